"""A model on one server: its files, the blocks it reads of them, and what they take on this machine."""
