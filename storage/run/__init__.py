"""The objects of a run, one module for each kind, and the base models that runs share."""
