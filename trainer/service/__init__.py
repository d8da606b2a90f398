"""The trainer service of one policy: batches in, versions and checkpoints out."""
