"""The watchdog of the local stack: it starts the stack's processes again when they end."""
