"""Spot checks: a client has parts of an answer computed again by other servers, and compares."""
