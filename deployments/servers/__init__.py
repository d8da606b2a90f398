"""The local Prefect and MLflow servers behind one guard."""
