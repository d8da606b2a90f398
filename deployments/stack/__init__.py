"""The local stack: its processes, their start, their state."""
