"""Workers without weights and without torch."""
