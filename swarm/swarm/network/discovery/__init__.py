"""How a node comes to know its first peers: names that are resolved, and nodes of the same local network."""
