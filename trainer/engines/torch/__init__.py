"""The embedded train engine: packed sequences, AdamW, one process."""
