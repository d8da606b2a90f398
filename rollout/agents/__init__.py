"""What a workflow works with: chat templates, contexts, seeds, time limits."""
