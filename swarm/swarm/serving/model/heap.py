"""Memory that has been freed, given back to the system while a model is loaded."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """glibc would keep several times what the weights take, in pieces that the next one does not fit into."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
