"""Makes what a stranger sent fit for a database: bounded in length and size, and of characters that every one takes.

What a text means is not judged: it only ever is a bound parameter, and whoever shows it escapes it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping

MAX_NAME = 256
MAX_WORDS = 1000
MAX_WHOLE = 2**53
MAX_NUMBER = 1e15
MAX_PHASES = 16
_DIGEST = 16


def bounded(text: str, limit: int = MAX_NAME) -> str:
    """At most `limit` characters; what was cut is told apart by a digest of the whole. Fitting text stays as it is.

    PostgreSQL takes no zero character, and neither database half a surrogate pair: they become question marks.
    """
    if len(text) <= limit and text.isascii() and "\0" not in text:
        return text
    clean = text.replace("\0", "?").encode("utf-8", "replace").decode("utf-8")
    if len(clean) <= limit:
        return clean
    digest = hashlib.sha256(clean.encode()).hexdigest()[:_DIGEST]
    return f"{clean[: limit - _DIGEST - 1]}…{digest}"


def whole(number: int) -> int:
    """Within what a database adds up without overflow."""
    return max(-MAX_WHOLE, min(number, MAX_WHOLE))


def finite(number: float | None) -> float | None:
    """`number`, or None if it is none that can be drawn."""
    return number if number is not None and math.isfinite(number) and abs(number) <= MAX_NUMBER else None


def phases_text(phases_s: Mapping[str, float]) -> str:
    """JSON of at most `MAX_PHASES` durations."""
    known = {bounded(name, 40): finite(seconds) for name, seconds in list(phases_s.items())[:MAX_PHASES]}
    return json.dumps({name: seconds for name, seconds in known.items() if seconds is not None})
