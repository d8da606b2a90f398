"""Tensors of one version as steps from another's, as bytes: loops, blocks, tensors. Knows neither files, stores nor versions."""
