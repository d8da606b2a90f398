"""Paths of this checkout and of the data sets beside it."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
"""Real data sets, which are no part of the project; a test that needs one skips where it is
missing.
"""
