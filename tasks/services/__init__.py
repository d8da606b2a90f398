"""Runs each service as the body of a Prefect flow."""
