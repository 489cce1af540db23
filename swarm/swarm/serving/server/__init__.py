"""The server's side of serving: announces a span, accepts sessions, computes their rows, and forwards the results."""
