"""Finds a node's first peers: names that are resolved, and nodes of the same local network."""
