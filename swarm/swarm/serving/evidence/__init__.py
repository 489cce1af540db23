"""Evidence that convicts servers: making it, judging it, keeping it, and passing it on."""
