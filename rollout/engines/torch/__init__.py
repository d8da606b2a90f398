"""The embedded rollout engine: continuous batching in torch."""
