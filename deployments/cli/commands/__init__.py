"""The commands of `astraflow`, by what they are about."""
