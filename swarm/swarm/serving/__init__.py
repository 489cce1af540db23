"""Serving a model in spans: the server of a span, the session over a chain of them, and what a client makes of it."""
