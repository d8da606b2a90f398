"""Prompt sources: files, hub data sets and the built-in chained addition."""
