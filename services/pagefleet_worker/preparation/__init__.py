"""A model from any source becomes a folder of small files and references to weights."""
