"""The right that a peer of a private network needs to call a method, to answer it, and to publish a record. Pure."""

from __future__ import annotations

from swarm_protocol.envelope import Envelope, read_record
from swarm_protocol.errors import PeerViolation
from swarm_protocol.network_invitation import Right
from swarm_protocol.records import NodeRecord, ServeRecord, TrainerRecord

_FOR_MEMBERS = frozenset({"train.standing", "train.history", "train.run_file"})
"""What dashboards and `run watch` ask trainers: the run's file and its certificates, and nothing of its weights."""

_RECORD_KINDS = ("nodes", "serve", "train")


def rights_to_call(method: str) -> tuple[Right, ...]:
    """Return the rights of which the caller of `method` needs one; a server pushes to the next one, so it may call."""
    name = method.partition("/")[0]
    if name.startswith("serving."):
        return ("ask", "serve")
    if name.startswith("train.") and name not in _FOR_MEMBERS:
        return ("train",)
    return ("join",)


def right_to_answer(method: str) -> Right:
    """Return the right that a peer needs to be asked for `method`."""
    match method.partition(".")[0]:
        case "serving":
            return "serve"
        case "train":
            return "train"
    return "join"


def rights_to_publish(envelope: Envelope) -> frozenset[Right]:
    """Return the rights that the signer of a record needs, all of them. Raises PeerViolation for a record that is not
    well formed."""
    if envelope.subject.partition("#")[0].partition("/")[0] not in _RECORD_KINDS:
        return frozenset({"join"})
    rights: set[Right] = {"join"}
    match read_record(envelope):
        case ServeRecord():
            rights.add("serve")
        case TrainerRecord():
            rights.add("train")
        case NodeRecord() as node:
            rights.update({"serve"} if node.models else (), {"train"} if node.runs else ())
    return frozenset(rights)


def may_publish(envelope: Envelope, rights: frozenset[str]) -> bool:
    """Return whether a signer with these rights may publish the record."""
    try:
        return rights_to_publish(envelope) <= rights
    except PeerViolation:
        return False
