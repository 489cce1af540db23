"""Spot checks: a client has other servers recompute parts of an answer, and compares the results."""
