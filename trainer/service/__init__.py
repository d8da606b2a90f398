"""The trainer of one policy: takes batches, publishes versions, saves checkpoints."""
