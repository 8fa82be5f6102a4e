"""A step: the engine, and what it runs on."""
