"""The records that a peer publishes about itself, and the DHT keys under which they are found.

This module holds the payloads; `envelope` seals and opens them. All numbers are claims of the peer: a decision that
uses one caps it by what the peer has proved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from swarm_protocol import limits, wire
from swarm_protocol.checks import (
    check_addr,
    check_choice,
    check_count,
    check_digest,
    check_float,
    check_int,
    check_name,
    check_text,
)
from swarm_protocol.identity import check_peer_id
from swarm_protocol.proto import records_pb2

Reachability: TypeAlias = Literal["public", "relay", "unknown"]
NodeState: TypeAlias = Literal["alive", "leaving"]
ServeState: TypeAlias = Literal["joining", "serving", "draining"]
TrainerState: TypeAlias = Literal["joining", "training", "finished", "leaving"]
Role: TypeAlias = Literal["seed", "gateway", "volunteer", "visitor", ""]
Kind: TypeAlias = Literal["nodes", "serve", "train"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One node: who, what hardware, how to reach it. Speeds are measured on a real block; 0: not measured.

    `models` and `runs` name what it serves and trains, so that looking up the nodes tells what the network has. `role`
    is what it was started as, "" if it does not say; a "visitor" only looks, as `swarm-node doctor` does. The time to
    first token is a gateway's, median and 95th percentile of its requests of the last minutes; both are None where
    there were none, and of nodes that take none.
    """

    name: str
    version: str
    addrs: tuple[str, ...]
    device: str
    memory_bytes: int
    free_memory_bytes: int
    reachability: Reachability
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    training_tokens_per_s: float = 0.0
    started_at: float
    state: NodeState = "alive"
    models: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    role: Role = ""
    first_token_p50_s: float | None = None
    first_token_p95_s: float | None = None

    def __post_init__(self) -> None:
        check_text(self.name, "name", max_chars=limits.MAX_NODE_NAME_CHARS, empty=False)
        check_text(self.version, "version", max_chars=limits.MAX_VERSION_CHARS, empty=False)
        check_text(self.device, "device", max_chars=limits.MAX_DEVICE_CHARS, empty=False)
        check_count(self.addrs, "addrs", max_items=limits.MAX_ADDRS)
        check_count(self.models, "models", max_items=limits.MAX_MODELS_PER_NODE)
        check_count(self.runs, "runs", max_items=limits.MAX_RUNS_PER_NODE)
        for addr in self.addrs:
            check_addr(addr, "addrs")
        for name in (*self.models, *self.runs):
            check_name(name, "models and runs")
        check_int(self.memory_bytes, "memory_bytes", high=limits.MAX_MEMORY_BYTES)
        check_int(self.free_memory_bytes, "free_memory_bytes", high=self.memory_bytes)
        check_choice(self.reachability, "reachability", ("public", "relay", "unknown"))
        check_float(self.prefill_tokens_per_s, "prefill_tokens_per_s", high=limits.MAX_TOKENS_PER_S)
        check_float(self.decode_tokens_per_s, "decode_tokens_per_s", high=limits.MAX_TOKENS_PER_S)
        check_float(self.training_tokens_per_s, "training_tokens_per_s", high=limits.MAX_TOKENS_PER_S)
        check_float(self.started_at, "started_at", high=limits.MAX_TIME_S)
        check_choice(self.state, "state", ("alive", "leaving"))
        check_choice(self.role, "role", ("seed", "gateway", "volunteer", "visitor", ""))
        _check_known(self.first_token_p50_s, "first_token_p50_s", high=limits.MAX_MEASURED_S)
        _check_known(self.first_token_p95_s, "first_token_p95_s", high=limits.MAX_MEASURED_S)

    def to_bytes(self) -> bytes:
        return wire.encode(wire.fill(records_pb2.NodeRecord, self))

    @classmethod
    def from_bytes(cls, data: bytes) -> NodeRecord:
        """Raises PeerViolation."""
        return wire.decode(data, records_pb2.NodeRecord, wire.flat(cls), max_bytes=limits.MAX_RECORD_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRecord:
    """A peer's span `[start, end)` of a model's `num_blocks` blocks.

    `revision` names the weights: servers of different revisions never form one chain. `prefill_ms_per_token` and
    `decode_ms_per_block` are the times of one block for one token; `rtt_ms` are round trips to neighbours by peer id.
    `relayed`: it is reached through another peer. `[next_start, next_end)` is the span it is about to move to; 0, 0 if
    it stays. `tokens_per_s` are those that it took through its span of late, prompts' included; None: its version does
    not say. `source` is the commit on a hub that the weights came from, OWNER/NAME@COMMIT; "": they came from none.
    """

    model: str
    revision: str
    num_blocks: int
    start: int
    end: int
    state: ServeState
    prefill_ms_per_token: float
    decode_ms_per_block: float
    free_kv_tokens: int
    queue_depth: int = 0
    rtt_ms: Mapping[str, float] = field(default_factory=dict, hash=False)
    relayed: bool = False
    next_start: int = 0
    next_end: int = 0
    tokens_per_s: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        check_name(self.model, "model")
        check_name(self.revision, "revision", max_bytes=limits.MAX_REVISION_BYTES)
        check_int(self.num_blocks, "num_blocks", low=1, high=limits.MAX_BLOCKS)
        check_int(self.end, "end", low=1, high=self.num_blocks)
        check_int(self.start, "start", high=self.end - 1)
        check_int(self.next_end, "next_end", high=self.num_blocks)
        check_int(self.next_start, "next_start", high=max(self.next_end - 1, 0))
        check_choice(self.state, "state", ("joining", "serving", "draining"))
        if self.source:
            check_name(self.source, "source", max_bytes=limits.MAX_SOURCE_BYTES)
        check_float(self.prefill_ms_per_token, "prefill_ms_per_token", high=limits.MAX_BLOCK_MS)
        check_float(self.decode_ms_per_block, "decode_ms_per_block", high=limits.MAX_BLOCK_MS)
        check_int(self.free_kv_tokens, "free_kv_tokens", high=limits.MAX_KV_TOKENS)
        check_int(self.queue_depth, "queue_depth", high=limits.MAX_QUEUE_DEPTH)
        check_count(tuple(self.rtt_ms), "rtt_ms", max_items=limits.MAX_RTT_PEERS)
        for peer_id, rtt_ms in self.rtt_ms.items():
            check_float(rtt_ms, f"rtt_ms of {check_peer_id(peer_id)}", high=limits.MAX_RTT_MS)
        _check_known(self.tokens_per_s, "tokens_per_s", high=limits.MAX_TOKENS_PER_S)
        # a copy, so that the caller's dict can change without changing this record
        object.__setattr__(self, "rtt_ms", dict(self.rtt_ms))

    def to_bytes(self) -> bytes:
        return wire.encode(wire.fill(records_pb2.ServeRecord, self))

    @classmethod
    def from_bytes(cls, data: bytes) -> ServeRecord:
        """Raises PeerViolation."""
        return wire.decode(data, records_pb2.ServeRecord, wire.flat(cls), max_bytes=limits.MAX_RECORD_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A contribution, or a member, that was refused in a round, and why, in the words of who refused it."""

    peer_id: str
    reason: str

    def __post_init__(self) -> None:
        check_peer_id(self.peer_id)
        check_text(self.reason, "reason", max_chars=limits.MAX_REFUSAL_CHARS, empty=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """A member's measurements of the round that committed `outer_step`.

    `phases_s` are durations by name, over all attempts at the step: "interval" of the inner steps, "group" until the
    signed group was here, "reduce" until this member could vote, "commit" until the certificate was here, "apply" until
    the state was adopted. With overlap an interval runs beside the round before. A phase without a measurement is
    absent. `bytes_sent` is all that this member sent for the step.
    """

    outer_step: int
    phases_s: Mapping[str, float] = field(default_factory=dict, hash=False)
    bytes_sent: int
    refused: tuple[Refusal, ...] = ()

    def __post_init__(self) -> None:
        check_int(self.outer_step, "report's outer_step", high=limits.MAX_OUTER_STEP)
        check_count(tuple(self.phases_s), "phases_s", max_items=limits.MAX_PHASES)
        for phase, seconds in self.phases_s.items():
            check_name(phase, "phases_s", max_bytes=limits.MAX_PHASE_NAME_BYTES)
            check_float(seconds, f"phases_s of {phase}", high=limits.MAX_MEASURED_S)
        check_int(self.bytes_sent, "bytes_sent", high=limits.MAX_ROUND_BYTES)
        check_count(self.refused, "refused", max_items=limits.MAX_REFUSALS)
        object.__setattr__(self, "phases_s", dict(self.phases_s))


_build_report = wire.flat(RoundReport, {"refused": wire.flat(Refusal)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationReport:
    """The loss on held-out data that one member measured of the state of `outer_step`."""

    outer_step: int
    loss: float

    def __post_init__(self) -> None:
        check_int(self.outer_step, "validation's outer_step", high=limits.MAX_OUTER_STEP)
        check_float(self.loss, "validation's loss", low=-limits.MAX_LOSS, high=limits.MAX_LOSS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRecord:
    """A peer's place in a run: the committed outer step and state digest it has, empty while it has none.

    `report` is of the newest round that it took part in and that was committed, which may be an earlier one; None until
    there is one. `num_parameters` are those that the run trains; None while it prepares. `validation` is its newest.
    All three are None where its version does not say.
    """

    run: str
    outer_step: int
    digest: bytes = b""
    tokens_per_s: float = 0.0
    loss: float | None = None
    state: TrainerState
    report: RoundReport | None = None
    num_parameters: int | None = None
    validation: ValidationReport | None = None

    def __post_init__(self) -> None:
        check_name(self.run, "run")
        check_int(self.outer_step, "outer_step", high=limits.MAX_OUTER_STEP)
        check_digest(self.digest, "digest", empty=True)
        check_float(self.tokens_per_s, "tokens_per_s", high=limits.MAX_TOKENS_PER_S)
        _check_known(self.loss, "loss", low=-limits.MAX_LOSS, high=limits.MAX_LOSS)
        check_choice(self.state, "state", ("joining", "training", "finished", "leaving"))
        if self.num_parameters is not None:
            check_int(self.num_parameters, "num_parameters", high=limits.MAX_PART_VALUES)

    def to_bytes(self) -> bytes:
        return wire.encode(wire.fill(records_pb2.TrainerRecord, self))

    @classmethod
    def from_bytes(cls, data: bytes) -> TrainerRecord:
        """Raises PeerViolation."""
        build = wire.flat(cls, {"report": _build_report, "validation": wire.flat(ValidationReport)})
        return wire.decode(data, records_pb2.TrainerRecord, build, max_bytes=limits.MAX_RECORD_BYTES)


Record: TypeAlias = NodeRecord | ServeRecord | TrainerRecord


def publish_key(record: Record, peer_id: str) -> str:
    """The one key under which `peer_id` publishes `record`; its shard follows from the peer id."""
    match record:
        case NodeRecord():
            prefix = "nodes"
        case ServeRecord():
            prefix = f"serve/{record.model}"
        case TrainerRecord():
            prefix = f"train/{record.run}"
    return f"{prefix}/{_shard(peer_id)}"


def lookup_keys(kind: Kind, name: str = "") -> tuple[str, ...]:
    """All keys that hold records of `kind`: of every node, or of the model or run `name`. Raises ValueError."""
    check_choice(kind, "kind", ("nodes", "serve", "train"))
    if kind == "nodes" and name:
        raise ValueError("the nodes have no name")
    prefix = kind if kind == "nodes" else f"{kind}/{check_name(name, 'name')}"
    return tuple(f"{prefix}/{shard}" for shard in range(limits.NUM_KEY_SHARDS))


def _check_known(value: object, field_name: str, *, low: float = 0.0, high: float) -> None:
    """`check_float`, where None is "not known"."""
    if value is not None:
        check_float(value, field_name, low=low, high=high)


def _shard(peer_id: str) -> int:
    return int.from_bytes(hashlib.sha256(peer_id.encode()).digest(), "big") % limits.NUM_KEY_SHARDS
