"""Rewards, and the judge of mathematical answers."""
