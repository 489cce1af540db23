"""Reads invitations from settings: to a private network (`--invite`), and to a run, or a vouch (`--invitation`).

Both are given as the word that was printed, or as the file that holds it. The words are secrets: no message repeats
one, nor what may be a part of one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from swarm_protocol.errors import ConfigError
from swarm_protocol.network_invitation import MAX_TEXT_CHARS, NetworkInvitation, parse_invitation
from swarm_protocol.network_invitation import TEXT_PREFIX as INVITATION_PREFIX
from swarm_protocol.run_credentials import TEXT_PREFIX as RUN_INVITATION_PREFIX
from swarm_protocol.run_credentials import RunInvitation, parse_run_invitation

from swarm_node.settings.parsers import parse_path

T = TypeVar("T")

_MAX_FILE_NAME_CHARS, _MAX_PATH_CHARS = 255, 4095
"""More than these no file's name and no path has on Linux and macOS."""


@dataclass(frozen=True, slots=True)
class _WordKind:
    """A kind of invitation: how its word begins, which command prints it, what it is, and which option takes it."""

    prefix: str
    printed_by: str
    what: str
    option: str


_NETWORK_WORD = _WordKind(INVITATION_PREFIX, "swarm-node invite", "an invitation to a private network", "--invite")
_RUN_WORD = _WordKind(
    RUN_INVITATION_PREFIX, "swarm-node run invite or run vouch", "an invitation to a run, or a vouch", "--invitation"
)


def parse_invite(text: str) -> NetworkInvitation:
    """Read an invitation to a private network, or a file that holds one. Raises ConfigError, which does not repeat
    it."""
    return _read_word(text, _NETWORK_WORD, parse_invitation)


def parse_run_word(text: str) -> RunInvitation:
    """Read an invitation to a run, a vouch, or a file that holds one. Raises ConfigError, which does not repeat it."""
    return _read_word(text, _RUN_WORD, parse_run_invitation)


def _read_word(text: str, kind: _WordKind, parse: Callable[[str], T]) -> T:
    """Parse the word `text`, or the one in the file that `text` names; an @ before the file's name is left out."""
    text = text.strip()
    if text.startswith((_NETWORK_WORD.prefix, _RUN_WORD.prefix)):
        return _parsed_word(text, kind, parse)
    if _is_cut_off(text):
        # to its reader it may still be an invitation, so no message shows it
        raise ConfigError(
            f"this is neither a file nor an invitation, which begins with {kind.prefix}",
            remedy=f"copy the whole line that {kind.printed_by} printed",
        )
    path = parse_path(text.removeprefix("@"))
    try:
        return _parsed_word(_word_in(path).strip(), kind, parse)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", remedy=error.remedy) from None


def _parsed_word(word: str, kind: _WordKind, parse: Callable[[str], T]) -> T:
    other = _RUN_WORD if kind is _NETWORK_WORD else _NETWORK_WORD
    if word.startswith(other.prefix):
        raise ConfigError(f"this is {other.what}", remedy=f"give it with {other.option}")
    return parse(word)


def _is_cut_off(text: str) -> bool:
    """Return whether `text` may be an invitation without its beginning: it names no file, and is long."""
    if len(text) > _MAX_PATH_CHARS or any(len(part) > _MAX_FILE_NAME_CHARS for part in text.split("/")):
        return True
    return re.fullmatch(r"[A-Za-z0-9_-]{40,}", text) is not None and not Path(text).exists()


def _word_in(path: Path) -> str:
    """Raises ConfigError."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_TEXT_CHARS + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it is not text"
        raise ConfigError(f"it cannot be read: {why.lower()}", remedy="give the invitation or its file") from None
