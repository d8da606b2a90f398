"""Checks of `astraflow doctor`: of this machine, and of a recipe."""
