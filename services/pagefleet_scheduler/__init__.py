"""The scheduler: decides what every worker computes next, and where every block is."""
