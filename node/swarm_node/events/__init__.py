"""The events that a command prints while it runs: `emitter` has all of them, and prints them."""
