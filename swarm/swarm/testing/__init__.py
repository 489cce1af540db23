"""Virtual time, for tests and simulations."""
