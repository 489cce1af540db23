"""The events that a command prints while it runs. `emitter` knows and prints all of them."""
