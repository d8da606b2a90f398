"""MLflow: runs, curves, registered models, data sets, traces."""
