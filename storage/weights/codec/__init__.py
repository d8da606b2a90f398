"""Bit-exact deltas between two versions of a tensor."""
