"""Text as bytes: how many tokens that makes, and which of them parts documents. Imports nothing."""

from __future__ import annotations

BYTE_VOCABULARY = 256
END_OF_TEXT = 0
"""The byte between two documents. It does not occur in text, so a byte-level model needs no further token."""
