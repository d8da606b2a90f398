"""What a server holds: weights and adapters, their files in memory, and the shapes of a model."""
