"""Reads invitations from settings: to a private network (`--invite`), and to a run, or a vouch (`--invitation`).

Both are given as the printed word, or as a file that contains it. The words are secret: no message repeats one, or text
that may be a part of one.
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
"""The longest name of a file, and the longest path, on Linux and macOS."""


@dataclass(frozen=True, slots=True)
class _WordKind:
    """A kind of invitation: the beginning of its word, the command that prints it, a description, and the option that
    takes it."""

    prefix: str
    printed_by: str
    what: str
    option: str


_NETWORK_WORD = _WordKind(INVITATION_PREFIX, "swarm-node invite", "an invitation to a private network", "--invite")
_RUN_WORD = _WordKind(
    RUN_INVITATION_PREFIX, "swarm-node run invite or run vouch", "an invitation to a run, or a vouch", "--invitation"
)


def parse_invite(text: str) -> NetworkInvitation:
    """Read an invitation to a private network, or a file with one. Raises ConfigError, which does not repeat it."""
    return _read_word(text, _NETWORK_WORD, parse_invitation)


def parse_run_word(text: str) -> RunInvitation:
    """Read an invitation to a run, a vouch, or a file with either. Raises ConfigError, which does not repeat it."""
    return _read_word(text, _RUN_WORD, parse_run_invitation)


def _read_word(text: str, kind: _WordKind, parse: Callable[[str], T]) -> T:
    """Parse the word `text`, or the word in the file that `text` names. An @ before the file's name is ignored."""
    text = text.strip()
    if text.startswith((_NETWORK_WORD.prefix, _RUN_WORD.prefix)):
        return _parsed_word(text, kind, parse)
    if _is_cut_off(text):
        # it may be a part of an invitation, so no message may show it
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
    """Return whether `text` may be an invitation without its beginning: it is long and names no file."""
    if len(text) > _MAX_PATH_CHARS or any(len(part) > _MAX_FILE_NAME_CHARS for part in text.split("/")):
        return True
    return re.fullmatch(r"[A-Za-z0-9_-]{40,}", text) is not None and not Path(text).exists()


def _word_in(path: Path) -> str:
    """Return the text of the file. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_TEXT_CHARS + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it is not text"
        raise ConfigError(f"it cannot be read: {why.lower()}", remedy="give the invitation or its file") from None
