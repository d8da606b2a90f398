"""Objects that runs share: the promotion log, outcomes of contests, nights."""
