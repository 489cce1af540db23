"""The committed state of a replica: its content, its name, its files, and how members fetch it from each other."""
