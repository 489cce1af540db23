"""Simulates networks of thousands of nodes in virtual time, with the real membership, record DHT, placement, routing
and rounds."""
