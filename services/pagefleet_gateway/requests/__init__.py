"""Bodies become what the scheduler is told: token ids and parameters without gaps."""
