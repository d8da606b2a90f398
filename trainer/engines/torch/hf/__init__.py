"""Models of transformers: how they are built and checked, and one that trains."""
