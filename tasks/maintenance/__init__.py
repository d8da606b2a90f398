"""Commands and flows on finished or running runs: garbage collection, export of models."""
