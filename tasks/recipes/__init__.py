"""Recipes: the configuration of a run, how it is read, layered and checked."""
