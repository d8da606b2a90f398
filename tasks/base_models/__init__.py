"""Base models: where version 0 of a policy comes from."""
