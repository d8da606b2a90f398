"""Train engines: the contract, and one folder per engine."""
