"""Answers in the form of each API, whole and as streams."""
