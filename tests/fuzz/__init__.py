"""What nobody should send."""
