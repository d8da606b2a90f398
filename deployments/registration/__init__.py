"""Deployments, work pools and flow runs at a Prefect server."""
