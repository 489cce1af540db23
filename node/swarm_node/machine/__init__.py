"""The machine that a node runs on: its hardware, its speed, and whether others reach it."""
