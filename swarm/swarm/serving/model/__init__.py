"""A model on one server: its files, the blocks that the server loads, and how they are computed."""
