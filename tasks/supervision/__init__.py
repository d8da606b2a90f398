"""The supervisor: starts, watches and replaces the services of a run."""
