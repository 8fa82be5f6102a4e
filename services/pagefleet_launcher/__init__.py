"""The `pagefleet` command: it starts the services as processes and imports none of them."""
