"""What a gateway tells of itself and its cell: metrics, traces, the live page."""
