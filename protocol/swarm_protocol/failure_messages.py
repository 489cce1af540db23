"""Encodes a SwarmError that a handler raises, so that its caller raises the same class again."""

from __future__ import annotations

import math

from swarm_protocol import errors, limits, wire
from swarm_protocol.checks import check_count, check_float, check_text
from swarm_protocol.errors import (
    PeerError,
    PeerRefused,
    PeerViolation,
    RoundError,
    SessionError,
    SwarmError,
    printable_line,
)
from swarm_protocol.identity import check_peer_id
from swarm_protocol.proto import failure_pb2

_INTERNAL = "internal"
_MAX_CODE_CHARS = 32
_ERRORS: dict[str, type[SwarmError]] = {
    each.code: each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, SwarmError)
}


def encode_failure(error: BaseException) -> bytes:
    """Encode an error. Never raises. Texts are cut to one printable line within the limits.

    An exception that is no SwarmError becomes "internal" without its text, which may hold paths or secrets.
    """
    if not isinstance(error, SwarmError):
        error = PeerError("the peer failed internally", remedy="its log has the cause; ask another peer")
        code = _INTERNAL
    else:
        code = error.code
    message = failure_pb2.Failure(
        code=code, message=_line(error.message), remedy=_line(error.remedy), peer_id=_known_id(error.peer_id)
    )
    if isinstance(error, PeerRefused) and math.isfinite(error.retry_after_s):
        message.retry_after_s = min(max(error.retry_after_s, 0.0), limits.MAX_RETRY_AFTER_S)
    if isinstance(error, PeerRefused) and error.lacks_room:
        message.reason = failure_pb2.Failure.NO_ROOM
    if isinstance(error, RoundError):
        known = (peer_id for peer_id in error.missing if _known_id(peer_id))
        message.missing.extend(list(dict.fromkeys(known))[: limits.MAX_FAILURE_PEERS])
    if isinstance(error, SessionError):
        message.session_id = _line(error.session_id)[: limits.MAX_NAME_BYTES]
    return wire.encode(message)


def decode_failure(data: bytes, peer_id: str) -> SwarmError:
    """Return the error that `peer_id` sent, for the caller to raise. Raises PeerViolation if `data` is malformed.

    The error's `peer_id` is the peer that the sender names, or else the sender. A peer that blames another one proves
    nothing about it. A code that this version does not know becomes PeerError.
    """
    try:
        return wire.decode(
            data, failure_pb2.Failure, lambda sent: _build(sent, peer_id), max_bytes=limits.MAX_FAILURE_BYTES
        )
    except PeerViolation as violation:
        violation.peer_id = peer_id
        raise


def _build(sent: failure_pb2.Failure, sender: str) -> SwarmError:
    code = check_text(sent.code, "code", max_chars=_MAX_CODE_CHARS, empty=False)
    message = check_text(sent.message, "message", max_chars=limits.MAX_FAILURE_TEXT_CHARS)
    remedy = check_text(sent.remedy, "remedy", max_chars=limits.MAX_FAILURE_TEXT_CHARS)
    peer_id = check_peer_id(sent.peer_id) if sent.peer_id else sender
    retry_after_s = check_float(sent.retry_after_s, "retry_after_s", high=limits.MAX_RETRY_AFTER_S)
    missing = tuple(check_peer_id(item) for item in sent.missing)
    check_count(missing, "missing", max_items=limits.MAX_FAILURE_PEERS)
    session_id = check_text(sent.session_id, "session_id", max_chars=limits.MAX_NAME_BYTES)
    if code == PeerRefused.code:
        lacks_room = sent.reason == failure_pb2.Failure.NO_ROOM
        return PeerRefused(message, remedy=remedy, peer_id=peer_id, retry_after_s=retry_after_s, lacks_room=lacks_room)
    if code == RoundError.code:
        return RoundError(message, remedy=remedy, peer_id=peer_id, missing=missing)
    if code == SessionError.code:
        return SessionError(message, remedy=remedy, peer_id=peer_id, session_id=session_id)
    return _ERRORS.get(code, PeerError)(message, remedy=remedy, peer_id=peer_id)


def _line(text: str) -> str:
    return printable_line(text)[: limits.MAX_FAILURE_TEXT_CHARS]


def _known_id(peer_id: str) -> str:
    try:
        return check_peer_id(peer_id)
    except ValueError:
        return ""
