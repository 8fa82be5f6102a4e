"""The worker: runs the steps that the scheduler plans, on a paged KV pool of its own."""
