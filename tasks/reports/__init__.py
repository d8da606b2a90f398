"""The HTML report of a run, with its plots."""
