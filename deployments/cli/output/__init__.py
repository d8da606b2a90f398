"""What the commands print: tables, the live view, progress, errors."""
