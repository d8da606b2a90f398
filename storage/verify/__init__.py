"""Verification of a run: every object against its digests, its key and the run's invariants."""
