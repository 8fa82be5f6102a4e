"""Whole cells: with models in this process, or as real processes over HTTP."""
