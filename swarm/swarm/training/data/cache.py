"""Keeps the folder of tokens within its bytes: those that were used least recently go first. Blocks; no state.

Tokens that a process on this machine is training on may go too: it has them open, and reads on.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)


def used(path: Path, max_bytes: int) -> None:
    """The tokens in `path` are used now. They stay, and what of the others is over `max_bytes` with them goes."""
    try:
        os.utime(path)
        kept = sorted(path.parent.glob("*.tokens"), key=lambda each: each.stat().st_mtime_ns, reverse=True)
        num_bytes = path.stat().st_size
        for other in kept:
            if other != path:
                num_bytes += other.stat().st_size
                if num_bytes > max_bytes:
                    other.unlink()
    except OSError as error:  # another process may be at the same
        logger.warning("the tokens in %s were not looked through: %s", path.parent, error)
