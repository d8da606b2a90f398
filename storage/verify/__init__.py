"""Verification of a whole run: every object against its digests, its place and the run's
invariants.
"""
