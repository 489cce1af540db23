"""Finds a node's first peers: resolves names, and finds nodes in the same local network."""
