"""Frozen records that services exchange, and the types of their fields. No files, no schemas."""
