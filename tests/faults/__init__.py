"""Faults in cells of real processes."""
