"""Decides purely from records which blocks a node serves and which servers a session uses."""
