"""Policy-gradient losses, one file each, and how token losses are aggregated."""
