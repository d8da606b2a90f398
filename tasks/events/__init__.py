"""Events of a run at the Prefect server, for people and for automations."""
