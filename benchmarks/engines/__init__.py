"""Benchmarks of the parts of engines."""
