"""Defines the records that a peer publishes about itself, and the DHT keys under which they are found.

This module holds the payloads; `envelope` seals and opens them. All numbers are claims of the peer: a decision that
uses one limits it to what the peer has proved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Annotated, Literal, TypeAlias, get_args

from swarm_protocol import limits, wire
from swarm_protocol.checks import (
    Addr,
    Check,
    Checked,
    Name,
    check_choice,
    check_digest,
    check_float,
    check_int,
    check_name,
    check_num_items,
    distinct,
    named,
    number,
    one_line,
    one_of,
    whole,
)
from swarm_protocol.identity import PeerId, check_peer_id
from swarm_protocol.proto import records_pb2
from swarm_protocol.version import KnownProtocol

Reachability: TypeAlias = Literal["public", "relay", "unknown"]
NodeState: TypeAlias = Literal["alive", "leaving"]
ServeState: TypeAlias = Literal["joining", "serving", "draining"]
TrainerState: TypeAlias = Literal["joining", "training", "finished", "leaving"]
Pause: TypeAlias = Literal["", "hours", "budget"]
Role: TypeAlias = Literal["seed", "gateway", "volunteer", "visitor", ""]
PathKind: TypeAlias = Literal["direct", "dialled back", "punched", "relayed"]
"""The way in which a connection was made: by a dial, by a dial back from the side that cannot be dialled, by hole
punching, or by a relay."""
Kind: TypeAlias = Literal["nodes", "serve", "train"]
OuterStep: TypeAlias = Annotated[int, whole(limits.MAX_OUTER_STEP)]
Loss: TypeAlias = Annotated[float, number(limits.MAX_LOSS, low=-limits.MAX_LOSS)]
TokensPerS: TypeAlias = Annotated[float, number(limits.MAX_TOKENS_PER_S)]
BlockMs: TypeAlias = Annotated[float, number(limits.MAX_BLOCK_MS)]
SERVED_DTYPES = ("float32", "bfloat16", "float16", "int8", "int4")
"""Kinds of weights. int8 and int4 compute in bfloat16."""
Moment: TypeAlias = Annotated[float, number(limits.MAX_TIME_S)]
MeasuredS: TypeAlias = Annotated[float, number(limits.MAX_MEASURED_S)]
NumConnected: TypeAlias = Annotated[int, whole(limits.MAX_CONNECTED)]


def _by_peer(max_peers: int, high: float, low: float = 0.0) -> Check:
    """Return the check of numbers in `[low, high]` by peer id, of `max_peers` at most."""

    def check(values: Mapping[str, float], field: str) -> None:
        check_num_items(values, field, max_items=max_peers)
        for peer_id, value in values.items():
            check_float(value, f"{field} of {check_peer_id(peer_id)}", low=low, high=high)

    return check


def _check_phases(phases_s: Mapping[str, float], field: str) -> None:
    check_num_items(phases_s, field, max_items=limits.MAX_PHASES)
    for phase, seconds in phases_s.items():
        check_name(phase, field, max_bytes=limits.MAX_PHASE_NAME_BYTES)
        check_float(seconds, f"{field} of {phase}", high=limits.MAX_MEASURED_S)


LinkMs: TypeAlias = Annotated[Mapping[str, float], _by_peer(limits.MAX_RTT_PEERS, limits.MAX_RTT_MS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PathCounts(Checked):
    """The numbers of peers that a node is connected to, by the kind of path."""

    direct: NumConnected = 0
    dialled_back: NumConnected = 0
    punched: NumConnected = 0
    relayed: NumConnected = 0

    def by_kind(self) -> dict[str, int]:
        """Return the counts by the name of the path."""
        return {
            "direct": self.direct,
            "dialled back": self.dialled_back,
            "punched": self.punched,
            "relayed": self.relayed,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord(wire.WireMessage):
    """One node, its hardware, and how to reach it. Speeds are measured on a real block; 0: not measured.

    `models` and `runs` name the models that it serves and the runs that it trains, so that a lookup of all nodes shows
    the network's. `role` is its kind of node, "" if it does not say; a "visitor" only reads, as `swarm-node doctor`
    does. The times to first token are the median and 95th percentile of a gateway's requests in the last minutes, None
    without any. `pause` is why a volunteer lends nothing now: it is outside its "hours", or its monthly "budget" of
    traffic is nearly used up; "" if it lends. It lends again at `lends_again_at`, in Unix seconds, None if it does not
    say. `paths` counts the peers that were connected when it signed the record; None: its version does not say.
    `protocol_version` is the one of its `Hello`.
    """

    PROTO = records_pb2.NodeRecord
    MAX_BYTES = limits.MAX_RECORD_BYTES

    name: Annotated[str, one_line(limits.MAX_NODE_NAME_CHARS, empty=False)]
    version: Annotated[str, one_line(limits.MAX_VERSION_CHARS, empty=False)]
    addrs: Annotated[tuple[Addr, ...], distinct(limits.MAX_ADDRS)]
    device: Annotated[str, one_line(limits.MAX_DEVICE_CHARS, empty=False)]
    memory_bytes: Annotated[int, whole(limits.MAX_MEMORY_BYTES)]
    free_memory_bytes: int
    reachability: Reachability
    prefill_tokens_per_s: TokensPerS = 0.0
    decode_tokens_per_s: TokensPerS = 0.0
    training_tokens_per_s: TokensPerS = 0.0
    started_at: Moment
    state: NodeState = "alive"
    models: Annotated[tuple[Name, ...], distinct(limits.MAX_MODELS_PER_NODE)] = ()
    runs: Annotated[tuple[Name, ...], distinct(limits.MAX_RUNS_PER_NODE)] = ()
    role: Role = ""
    first_token_p50_s: MeasuredS | None = None
    first_token_p95_s: MeasuredS | None = None
    pause: Pause = ""
    lends_again_at: Moment | None = None
    paths: PathCounts | None = None
    protocol_version: KnownProtocol = 0

    def __post_init__(self) -> None:
        check_int(self.free_memory_bytes, "free_memory_bytes", high=self.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRecord(wire.WireMessage):
    """A peer's span `[start, end)` of a model's `num_blocks` blocks.

    `revision` names the weights: servers of different revisions never form one chain. `prefill_ms_per_token` and
    `decode_ms_per_block` are the times of one block for one token; `rtt_ms` are round trips to neighbours by peer id.
    `relayed`: it is reached through another peer. `[next_start, next_end)` is the span to which it is about to move; 0,
    0 if it stays. `tokens_per_s` counts the tokens that lately went through its span, prompts included; None: its
    version does not say. `send_ms_per_token` is how long its upload takes for the hidden states of one token, which it
    sends to the next server and to the client; 0 without a limit, and for a span with the last block, which sends only
    tokens. A proposal (see `swarm.router.placement`) has it for any span. `token_ms` is the measured time in which one
    token's hidden states come from a neighbour, beyond half the round trip. `source` is the commit on a hub from which
    the weights came, OWNER/NAME@COMMIT, or "". `manifest` is the digest of the weights' signed manifest; b"" if they
    are not published. `dtype` is the kind of its weights, one of SERVED_DTYPES; "": its version does not say. A
    proposal has a span of as many blocks as leave room for many sessions, and in `max_blocks` the most that its peer
    can hold. A `max_blocks` below the span's length, such as 0, counts as that length.
    """

    PROTO = records_pb2.ServeRecord
    MAX_BYTES = limits.MAX_RECORD_BYTES

    model: Name
    revision: Annotated[str, named(limits.MAX_REVISION_BYTES)]
    num_blocks: Annotated[int, whole(limits.MAX_BLOCKS, low=1)]
    start: int
    end: int
    state: ServeState
    prefill_ms_per_token: BlockMs
    decode_ms_per_block: BlockMs
    free_kv_tokens: Annotated[int, whole(limits.MAX_KV_TOKENS)]
    queue_depth: Annotated[int, whole(limits.MAX_QUEUE_DEPTH)] = 0
    rtt_ms: LinkMs = field(default_factory=dict, hash=False)
    relayed: bool = False
    next_start: int = 0
    next_end: int = 0
    tokens_per_s: TokensPerS | None = None
    source: str = ""
    send_ms_per_token: BlockMs = 0.0
    token_ms: LinkMs = field(default_factory=dict, hash=False)
    manifest: Annotated[bytes, partial(check_digest, empty=True)] = b""
    dtype: Annotated[str, one_of(("", *SERVED_DTYPES))] = ""
    max_blocks: Annotated[int, whole(limits.MAX_BLOCKS)] = 0

    def __post_init__(self) -> None:
        check_int(self.end, "end", low=1, high=self.num_blocks)
        check_int(self.start, "start", high=self.end - 1)
        check_int(self.next_end, "next_end", high=self.num_blocks)
        check_int(self.next_start, "next_start", high=max(self.next_end - 1, 0))
        if self.source:
            check_name(self.source, "source", max_bytes=limits.MAX_SOURCE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal(Checked):
    """A refusal in a round of a contribution or a member, with the reason in the words of the peer that refused."""

    peer_id: PeerId
    reason: Annotated[str, one_line(limits.MAX_REFUSAL_CHARS, empty=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport(Checked):
    """A member's measurements of the round that committed `outer_step`.

    `phases_s` are durations by name, over all attempts at the step: "interval" of the inner steps, "group" until the
    signed group was here, "reduce" until this member could vote, "commit" until the certificate was here, "apply" until
    the state was adopted. With overlap an interval runs beside the round before. A phase without a measurement is
    absent. `bytes_sent` is this member's traffic for the step. `rates_from` are the bytes per second at which the
    slices of other members arrived; of many, those of the slowest.
    """

    outer_step: OuterStep
    phases_s: Annotated[Mapping[str, float], _check_phases] = field(default_factory=dict, hash=False)
    bytes_sent: Annotated[int, whole(limits.MAX_ROUND_BYTES)]
    refused: Annotated[tuple[Refusal, ...], distinct(limits.MAX_REFUSALS)] = ()
    rates_from: Annotated[Mapping[str, float], _by_peer(limits.MAX_REPORTED_RATES, limits.MAX_LINK_BYTES_PER_S)] = (
        field(default_factory=dict, hash=False)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationReport(Checked):
    """The loss on held-out data that one member measured of the state of `outer_step`."""

    outer_step: OuterStep
    loss: Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRecord(wire.WireMessage):
    """A member of a run, with its committed outer step and state digest, empty while it has none.

    `report` is about the newest committed round in which it took part, None without one. `num_parameters` counts the
    run's parameters, None while it prepares. `validation` is its newest. All three are None if its version does not
    say. `endorsed_step` is the outer step of the newest endorsement of the run's author that the peer can show (see
    `commit_messages.Endorsement`); 0: it has none. `held_out_scores` are those of the state that it has, in nats by
    member: the lowest ones, if there are more than a record holds (see `swarm.training.standing.held_out_scores`).
    """

    PROTO = records_pb2.TrainerRecord
    MAX_BYTES = limits.MAX_RECORD_BYTES

    run: Name
    outer_step: OuterStep
    digest: Annotated[bytes, partial(check_digest, empty=True)] = b""
    tokens_per_s: TokensPerS = 0.0
    loss: Loss | None = None
    state: TrainerState
    report: RoundReport | None = None
    num_parameters: Annotated[int, whole(limits.MAX_PART_VALUES)] | None = None
    validation: ValidationReport | None = None
    endorsed_step: OuterStep = 0
    held_out_scores: Annotated[
        Mapping[str, float], _by_peer(limits.MAX_REPORTED_SCORES, limits.MAX_EFFECT, low=-limits.MAX_EFFECT)
    ] = field(default_factory=dict, hash=False)


Record: TypeAlias = NodeRecord | ServeRecord | TrainerRecord

_LEVEL = "#"
"""The character before the digits of a key. No name contains it, so that no model's name looks like another's key."""


def publish_key(record: Record, peer_id: str, depth: int = 0) -> str:
    """Return the key of this `depth` under which `peer_id` publishes `record`: of depth 0, or, if that one is full, of
    the next depth.

    Each key has NUM_CHILD_KEYS below it, from which the peer id selects one. So keys form a tree that grows with the
    number of records (a prefix hash tree: Ramabhadran et al. 2004).
    """
    prefix = "/".join(filter(None, kind_and_name(record)))
    return f"{prefix}{_LEVEL}{_path_of(peer_id, depth) if depth else ''}"


def kind_and_name(record: Record) -> tuple[Kind, str]:
    """Return the kind of a record, and the model or run that it is about; "" for a node."""
    match record:
        case NodeRecord():
            return "nodes", ""
        case ServeRecord():
            return "serve", record.model
        case TrainerRecord():
            return "train", record.run


@lru_cache(maxsize=2**14)
def _path_of(peer_id: str, depth: int) -> str:
    digits = int.from_bytes(hashlib.sha256(peer_id.encode()).digest(), "big")
    return "".join(str(digits // limits.NUM_CHILD_KEYS**level % limits.NUM_CHILD_KEYS) for level in range(depth))


def lookup_key(kind: Kind, name: str = "") -> str:
    """Return the key of depth 0 for records of `kind`: of every node, or of the model or run `name`. Raises
    ValueError."""
    check_choice(kind, "kind", get_args(Kind))
    if kind == "nodes" and name:
        raise ValueError("the nodes have no name")
    prefix = kind if kind == "nodes" else f"{kind}/{check_name(name, 'name')}"
    return f"{prefix}{_LEVEL}"


def root_key(key: str) -> str:
    """Return the key of depth 0 that `key` is, or is below."""
    return key[: key.index(_LEVEL) + 1]


def child_keys(key: str) -> tuple[str, ...]:
    """Return the keys below `key`, which have the records that do not fit under it; empty below MAX_KEY_DEPTH."""
    depth = len(key) - key.index(_LEVEL) - 1
    return tuple(f"{key}{child}" for child in range(limits.NUM_CHILD_KEYS)) if depth < limits.MAX_KEY_DEPTH else ()
