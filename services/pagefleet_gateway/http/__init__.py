"""The routes, and all that stands between a socket and a route."""
