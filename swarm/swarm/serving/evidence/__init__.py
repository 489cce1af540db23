"""Evidence that convicts servers: how it is kept, and sent to others."""
