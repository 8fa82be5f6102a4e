"""Blocks, slots and tables: the KV pool, and how a step's rows reach it."""
