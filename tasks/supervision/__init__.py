"""Who takes part in a run, and how they are started, watched, replaced and ended."""
