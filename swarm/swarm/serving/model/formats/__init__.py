"""Checkpoints that keep a weight in several tensors of few bits, and how each is turned back into one of floats."""
