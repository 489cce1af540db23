"""Spot checks: a client asks other servers to compute parts of an answer again, and compares."""
