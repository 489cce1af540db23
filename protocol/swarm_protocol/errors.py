"""Every failure that Swarm can name, as one tree.

    SwarmError
    ├── ConfigError        what the user asked for cannot be done; the remedy says what to change
    ├── StartError         a daemon could not start: binary, port, peer, clock or network
    ├── PeerError          a remote peer did not do its part
    │   ├── PeerUnreachable    no connection, or it broke
    │   ├── PeerTimeout        connected, but no answer before the deadline
    │   ├── PeerRefused        the peer said no, and perhaps when to ask again (`retry_after_s`)
    │   └── PeerViolation      the peer sent what breaks the protocol: never retry with the same peer
    ├── RoundError         an attempt at an outer step failed; the committed state is untouched
    ├── SessionError       an inference session cannot go on
    └── IntegrityError     bytes do not match their digest or signature

`message` says what happened in one line, `remedy` what to do about it, `peer_id` who was involved.
If a handler raises one of these, the same class is raised in its caller. `swarm_protocol.failure_messages` has the
form on the wire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar


class SwarmError(Exception):
    """The base of every error that Swarm raises on purpose. Any other exception that escapes is a bug."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, remedy: str = "", peer_id: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.peer_id = peer_id

    def __str__(self) -> str:
        return f"{self.message}: {self.remedy}" if self.remedy else self.message


class ConfigError(SwarmError):
    """What the user asked for cannot be done; the remedy says what to change.

    `field` names the field of the request that is at fault, if there is one. `field` does not cross the network.
    """

    code = "config"

    def __init__(self, message: str, *, remedy: str = "", peer_id: str = "", field: str = "") -> None:
        super().__init__(message, remedy=remedy, peer_id=peer_id)
        self.field = field


class StartError(SwarmError):
    """A daemon could not start."""

    code = "start"


class PeerError(SwarmError):
    """A remote peer, `peer_id`, did not do its part."""

    code = "peer"


class PeerUnreachable(PeerError):
    """There is no connection to the peer, or it broke."""

    code = "unreachable"


class PeerTimeout(PeerError):
    """The peer is connected, but did not answer before the deadline."""

    code = "timeout"


class PeerRefused(PeerError):
    """The peer is healthy but does not do this now. A `retry_after_s` of 0 means: do not ask again.

    `lacks_room` is set if it has no room for a sequence, for more of one, or for a call; with a `retry_after_s` of 0 it
    never has so much room.
    """

    code = "refused"

    def __init__(
        self,
        message: str,
        *,
        remedy: str = "",
        peer_id: str = "",
        retry_after_s: float = 0.0,
        lacks_room: bool = False,
    ) -> None:
        super().__init__(message, remedy=remedy, peer_id=peer_id)
        self.retry_after_s = retry_after_s
        self.lacks_room = lacks_room


class PeerViolation(PeerError):
    """The peer sent something that breaks the protocol. A request is not repeated with the same peer."""

    code = "violation"


class RoundError(SwarmError):
    """An attempt at an outer step failed. `missing` names the members known to be absent or at fault."""

    code = "round"

    def __init__(self, message: str, *, remedy: str = "", peer_id: str = "", missing: tuple[str, ...] = ()) -> None:
        super().__init__(message, remedy=remedy, peer_id=peer_id)
        self.missing = missing


class SessionError(SwarmError):
    """The inference session `session_id` cannot go on."""

    code = "session"

    def __init__(self, message: str, *, remedy: str = "", peer_id: str = "", session_id: str = "") -> None:
        super().__init__(message, remedy=remedy, peer_id=peer_id)
        self.session_id = session_id


class IntegrityError(SwarmError):
    """Bytes do not match their digest or signature."""

    code = "integrity"


def reason_of(error: Exception) -> str:
    """Return why a file or device could not be used: for an OSError, the system's text without errno and path.

    For any other exception, return what `text_of` returns, or the name of its class if the text is empty.
    """
    system_text = error.strerror.lower() if isinstance(error, OSError) and error.strerror else ""
    return system_text or text_of(error) or type(error).__name__


def text_of(error: BaseException) -> str:
    """Return an exception's text as one printable line, since the text may quote a stranger's file.

    The text of a KeyError is the key alone, so "there is no" is put before it.
    """
    return printable_line(f"there is no {error}" if isinstance(error, KeyError) and error.args else str(error))


def one_line(error: BaseException) -> str:
    """Return an exception's text as one line of at most 300 characters."""
    return text_of(error)[:300]


def printable_line(text: str) -> str:
    """Return `text` as one printable line: each run of spaces and unprintable characters becomes one space."""
    printable = "".join(character if character.isprintable() else " " for character in text)
    return " ".join(printable.split())


def first_few(names: Sequence[str], max_named: int, as_text: Callable[[str], str] = str) -> str:
    """Return the first `max_named` of `names`, each formatted by `as_text`, and the number of those left out."""
    num_more = len(names) - max_named
    return ", ".join(map(as_text, names[:max_named])) + (f" and {num_more} more" if num_more > 0 else "")


def cause(error: BaseException) -> BaseException:
    """Return the failure inside nested exception groups. If a group holds several, prefer a SwarmError."""
    while isinstance(error, BaseExceptionGroup):
        ours = [each for each in error.exceptions if isinstance(each, SwarmError)]
        error = (ours or error.exceptions)[0]
    return error
