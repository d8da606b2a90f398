"""Numbers of bytes as text."""

from rich import filesize


def spelled(num_bytes: float) -> str:
    """Return a number of bytes as text: `spelled(245_832)` → `245.8 kB`; 1 kB is 1,000 bytes."""
    return filesize.decimal(round(num_bytes))
