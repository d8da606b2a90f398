"""Extraction and exact comparison of mathematical answers."""
