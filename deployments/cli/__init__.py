"""The command `astraflow`."""
