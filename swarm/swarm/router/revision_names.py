"""How people name one of several revisions of a model: `NAME@REVISION`, by its digest or what that begins with."""

from __future__ import annotations

import re

from swarm_protocol import limits

MIN_PIN_CHARS = 8
"""Of a revision's digest, where it is pinned by its beginning: few enough to type, and no two are alike by chance."""

SHORT_REVISION = 12

_PINNED = re.compile(rf"(.+)@([0-9a-f]{{{MIN_PIN_CHARS},{limits.MAX_REVISION_BYTES}}})")


def split_pin(model: str) -> tuple[str, str]:
    """The name in `NAME@REVISION`, and the beginning of the digest that is pinned; empty if none is.

    A name is never looked up with what looks like a pin, so that nobody can take a pinned one over by its full name.
    """
    pinned = _PINNED.fullmatch(model)
    return (pinned[1], pinned[2]) if pinned else (model, "")


def short(revision: str) -> str:
    """As much of a revision as people tell apart."""
    return revision[:SHORT_REVISION]
