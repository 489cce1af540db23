"""Simulates a network of thousands of nodes: the real membership, record DHT, placement, routing and rounds in virtual
time."""
