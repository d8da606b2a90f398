"""Numbers of bytes as people read them."""


def spelled(num_bytes: float) -> str:
    """Example: `spelled(245_832)` → `246 kB`; 1 kB is 1,000 bytes."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            value = num_bytes / size
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{num_bytes:,.0f} B"
