"""Private networks: their members, the rights of each, and the gate that answers only members."""
