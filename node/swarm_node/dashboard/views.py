"""Defines what the dashboard shows, in the form of the JSON API: the one contract between collector, API and pages.

Values only. Their texts come from peers or users, bounded by the protocol's limits, and must be escaped where they are
shown. Times are Unix seconds. None means "not known", never zero. The API keeps its field names: `words` is a summary
in one sentence, `run` is a run's id, and `happenings` are changes.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict
from swarm_protocol.records import PathKind

from swarm_node.formatting import Reach


class View(BaseModel):
    """The base of all views: frozen, without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def of(cls, record: object, **more: Any) -> Self:
        """Return a view with the fields that `record` (a record or a database row) has under the same names, and with
        `more`."""
        names = cls.model_fields.keys() - more.keys()
        return cls(**{name: getattr(record, name) for name in names if hasattr(record, name)}, **more)


class PathView(View):
    """Tells how the observing node is connected to a peer, and how many payload bytes they exchanged.

    The bytes are rounded down to whole MiB: otherwise visitors of a gateway's dashboard could infer the lengths of
    answers.
    """

    kind: PathKind
    rtt_ms: float | None
    sent_bytes: int
    received_bytes: int


class NodeView(View):
    """One node, as its newest signed record says. `from_here` is what the observing node itself knows.

    If several nodes have the same name, `name` ends with the end of the peer id. Speeds are tokens per second of a
    probe; None: not measured.
    """

    peer_id: str
    name: str
    version: str
    protocol_version: int = 0  # 0: its record does not say
    device: str
    state: Literal["alive", "leaving", "gone"]
    reachability: Reach
    # what it was started as; "": its record does not say
    role: Literal["seed", "gateway", "volunteer", "visitor", ""] = ""
    memory_bytes: int
    free_memory_bytes: int
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    training_tokens_per_s: float | None
    started_at: float
    age_s: float  # seconds since its record was signed
    models: tuple[str, ...]
    runs: tuple[str, ...]
    pause: Literal["", "hours", "budget"] = ""  # why it lends nothing now; "": it lends
    lends_again_at: float | None = None
    paths: dict[str, int] | None = None  # number of connected peers by path; None: its record does not say
    from_here: PathView | None = None  # None: not connected, or it is the observing node itself
    is_observer: bool = False  # it is the observing node


class PresenceView(View):
    """A time in which a node was seen. `until` is None while the node is there."""

    since: float
    until: float | None


class NodeDetail(View):
    """One node with what the history knows of it."""

    node: NodeView
    presence: tuple[PresenceView, ...]  # the newest 30 days, oldest first
    uptime_share: float | None  # share of the time since it was first seen, at most 30 days
    tokens_trained: int  # in committed steps that this dashboard has seen
    rounds: int
    serving: tuple[ServerView, ...]
    training: tuple[ContributorView, ...]


class ServerView(View):
    """One server of a model's blocks `[start, end)`."""

    peer_id: str
    name: str  # the node's name, or the end of the peer id while the node is not known
    model: str
    start: int
    end: int
    state: Literal["joining", "serving", "draining"]
    queue_depth: int
    free_kv_tokens: int
    prefill_ms_per_token: float
    decode_ms_per_block: float
    tokens_per_s: float | None  # recently computed; None: its version does not report it
    relayed: bool
    next_start: int | None  # the span that it is about to move to
    next_end: int | None
    age_s: float
    # what it is convicted of, by evidence checked here: clients with the evidence do not use it
    convicted: str | None = None
    # the gateway of this dashboard failed to reach it, and has not heard of it since
    unreachable: bool = False


class SpanView(View):
    """The blocks `[start, end)` that one server of a chain computes."""

    peer_id: str
    name: str
    start: int
    end: int


class ChainView(View):
    """The spans that a new session would use now, and their milliseconds per token.

    `assumed_ms` is the part of `ms_per_token` that is assumed, for links without a measured round trip.
    """

    spans: tuple[SpanView, ...]
    ms_per_token: float
    assumed_ms: float = 0.0


class RevisionView(View):
    """Other weights served under the same name. `is_whole` means that all their blocks are served."""

    revision: str
    num_servers: int
    is_whole: bool


class ModelView(View):
    """One model of the network with its health.

    All fields except `other_revisions` describe one revision: the one with the fewest missing blocks, then the most
    servers.
    """

    name: str
    revision: str
    num_blocks: int
    health: Literal["whole", "thin", "incomplete"]  # thin: some block has a single server
    words: str
    num_servers: int
    missing: tuple[tuple[int, int], ...]  # [start, end) that nobody serves
    weakest_block: int | None
    weakest_replicas: int
    tokens_per_s: float | None
    other_revisions: tuple[RevisionView, ...] = ()  # most servers first, at most 8
    manifest: str | None = None  # digest of the signed manifest; None: unpublished
    publisher: str | None = None  # peer id of the manifest's signer, once the signature was checked


class ModelDetail(View):
    """One model with its servers, and the chains that would answer a request."""

    model: ModelView
    servers: tuple[ServerView, ...]  # by start, then end
    replicas: tuple[int, ...]  # per block
    chains: tuple[ChainView, ...]  # the cheapest, then others that share no server with earlier ones


class StepView(View):
    """A committed outer step. What only members know is None if no record reported it in time."""

    outer_step: int
    at: float  # when this dashboard saw it
    loss: float
    digest: str
    num_members: int  # members of its group, including those that contributed nothing
    num_tokens: int
    seconds: float | None  # seconds since the step before
    # median duration in seconds over the group, by phase: interval, group, reduce, commit, apply
    phases_s: dict[str, float]
    bytes_per_parameter: float | None  # bytes that a member sent, median over the group
    validation_loss: float | None = None  # held-out loss of the state after the step, median over the group


class RefusalView(View):
    """A contribution that a member refused or counted less, with the reason in that member's words."""

    outer_step: int
    at: float
    peer_id: str
    name: str
    by_peer_id: str
    reason: str


class BanView(View):
    """A member that is excluded from the run's rounds, because evidence checked here proves that it lied.

    `until` is the last outer step from which it is excluded. None: it is excluded for good.
    """

    peer_id: str
    name: str
    outer_step: int
    kind: str
    reason: str
    until: int | None


class ContributorView(View):
    """One peer that trains a run or has contributed to it."""

    peer_id: str
    name: str
    run: str
    state: Literal["joining", "training", "finished", "leaving", "gone"]
    outer_step: int
    tokens_per_s: float | None
    tokens: int  # in committed steps that this dashboard has seen
    rounds: int  # also in steps that this dashboard has seen
    uptime_s: float | None  # seconds since this dashboard first saw it in the run
    # by how much its work lowers the held-out loss, in nats per step, as members report
    held_out_score: float | None = None


class RunView(View):
    """One run. `name` and numbers from the run's file are None until a member has given the signed file.

    `remembered` is when the run was last seen, if nobody trains it any more and only the history knows it.
    """

    run: str
    name: str | None
    signed_by: str | None
    state: Literal["training", "finished", "waiting", "gone"]
    words: str
    outer_step: int
    outer_steps: int | None
    loss: float | None
    losses: tuple[float, ...]  # of the newest committed steps, at most 60, for a sparkline
    num_members: int
    num_agreeing: int  # members at the newest committed step whose digest is that of a committed state
    num_at_step: int  # members that say that they are at that step
    digest: str
    tokens_per_s: float | None
    projected_end: float | None
    remembered: float | None = None
    endorsed_step: int | None = None  # newest step that the author has endorsed, verified here; 0: none was seen
    num_on_probation: int | None = None  # members on probation in the newest step whose proof was seen here
    num_trainers: int | None = None  # members that took part in that step
    entrance: str | None = None  # who may join and what invitations do, in words
    needs_invitation: bool = False  # only peers that the run names may join without an invitation
    slow_links: tuple[str, ...] = ()  # members and links that are slower than others, in words


class CheckpointFile(View):
    """One downloadable file of a run's newest checkpoint."""

    name: str
    num_bytes: int
    url: str


class RunDetail(View):
    """One run with its steps, contributors, refusals and bans."""

    run: RunView
    num_parameters: int | None
    steps: tuple[StepView, ...]  # oldest first, downsampled to at most 500
    refusals: tuple[RefusalView, ...]  # newest first, at most 100
    contributors: tuple[ContributorView, ...]  # most tokens first
    checkpoint: tuple[CheckpointFile, ...]
    bans: tuple[BanView, ...] = ()  # newest first, at most 100


class ChangeEvent(View):
    """One line of the log of changes: a node that joined or left, a model's new health, or a run's new state."""

    at: float
    kind: Literal["join", "leave", "model", "run"]
    peer_id: str | None
    words: str


class Series(View):
    """One number over time, evenly spaced. A value is None where nothing was known."""

    name: str
    unit: str
    start: float
    step_s: float
    values: tuple[float | None, ...]


class Overview(View):
    """The state of the network. `at` is when the records were last read. `stale` says why figures are old or
    missing."""

    at: float
    stale: str | None
    network_id: str
    version: str
    num_nodes: int  # alive, including seeds, gateways and dashboards
    num_volunteers: int  # those of them that serve, train or wait for work
    nodes_by_state: dict[str, int]  # alive, leaving
    nodes_by_reachability: dict[str, int]
    paths: dict[str, int] = {}  # connections by path as nodes report them: a connection between two nodes counts twice
    models: tuple[ModelView, ...]
    runs: tuple[RunView, ...]
    tokens_per_s: float | None  # answered, over all models
    training_tokens_per_s: float | None  # trained, over all runs
    first_token_p50_s: float | None  # seconds, for the gateways' requests of the last minutes
    first_token_p95_s: float | None
    joins_24h: int | None  # null while the history has not been read
    leaves_24h: int | None
    turnover_since: float | None = None  # when the two counts begin, if the history is younger than 24 hours
    happenings: tuple[ChangeEvent, ...]  # newest first, at most 20
    join_command: str
    num_paused: int = 0  # volunteers that lend nothing now
    lends_again_at: float | None = None  # when the first of them lends again


class ViewSource(Protocol):
    """The source of the newest views, held in memory, for the API, the pages, the live events and `top`.

    Nothing here asks a peer, so a visitor costs no lookup. Reads of the history are awaited. An unknown name returns
    None.
    """

    def overview(self) -> Overview: ...

    async def model(self, name: str) -> ModelDetail | None: ...

    async def run(self, run_id: str) -> RunDetail | None: ...

    def nodes(self) -> tuple[NodeView, ...]:
        """Return all nodes, by name, then peer id."""
        ...

    async def node(self, peer_id: str) -> NodeDetail | None: ...

    async def series(self, name: str, hours: float) -> Series | None:
        """Return the newest `hours` of the number `name`. `/api/v1/series` documents the names."""
        ...

    async def wait_changed(self) -> None:
        """Wait until the collector has polled once more, whether or not anything changed."""
        ...
