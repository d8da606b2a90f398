"""`astraflow verify`: the invariants of a run, checked from its store alone."""
