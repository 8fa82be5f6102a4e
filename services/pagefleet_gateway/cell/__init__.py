"""The gateway's side of the talk with the scheduler: open requests, and what comes back."""
