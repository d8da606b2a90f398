"""Tensors of one version as steps from another's, as bytes: loops, blocks, tensors. Knows no files, stores or versions."""
