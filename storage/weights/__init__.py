"""Weights of a policy: published once per version, read by the cheapest path, replicated,
retired.
"""
