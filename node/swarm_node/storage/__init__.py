"""A node's directory on disk, and the small files in it that the next start reads."""
