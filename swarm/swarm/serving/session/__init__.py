"""A session over a chain of servers: the client that drives it, and each server that it runs through."""
