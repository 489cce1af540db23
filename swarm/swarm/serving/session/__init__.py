"""The client's side of serving: one session over a chain of servers that may change while it runs."""
