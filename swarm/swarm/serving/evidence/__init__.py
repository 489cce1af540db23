"""Evidence that convicts servers: keeping it, and passing it on."""
