"""The training step that all built-in engines share: pure data, then one loop."""
