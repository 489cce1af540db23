"""A simulated internet in one event loop: the second implementation of `Network`, for tests and simulations."""
