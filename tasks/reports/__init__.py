"""The report of a run: which numbers of the store it shows, and how they are drawn."""
