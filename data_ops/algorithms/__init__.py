"""Data algorithms: curators, filters, samplers, advantages."""
