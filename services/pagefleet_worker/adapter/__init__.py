"""Models of transformers over the paged pool."""
