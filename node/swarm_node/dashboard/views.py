"""Defines what the dashboard shows, as the JSON API gives it: the one contract between the collector, the API and the
pages.

Values only. Every text in them comes from peers or users, bounded by the protocol's limits: who shows it escapes it.
Times are Unix seconds; a `None` is "not known", never zero. The names of fields are the API's, so they stay as they
are: `words` is a summary in one sentence, `run` a run's id, and `happenings` are changes.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict
from swarm_protocol.records import PathKind

from swarm_node.formatting import Reach


class View(BaseModel):
    """The base of all views: frozen, and strict about its fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def of(cls, record: object, **more: Any) -> Self:
        """Make a view of what a record or a row has under the same names, and of `more`."""
        names = cls.model_fields.keys() - more.keys()
        return cls(**{name: getattr(record, name) for name in names if hasattr(record, name)}, **more)


class PathView(View):
    """Says how the node that looks is connected to a peer, and the payload bytes exchanged with it.

    The bytes are rounded down to whole MiB: visitors of a gateway's dashboard could tell the lengths of answers else.
    """

    kind: PathKind
    rtt_ms: float | None
    sent_bytes: int
    received_bytes: int


class NodeView(View):
    """One node, as its newest signed record says; `from_here` is what the node that looks knows itself. Where several
    nodes have the same name, `name` ends with the end of the peer id.

    Speeds are tokens a second of a probe, None: not measured.
    """

    peer_id: str
    name: str
    version: str
    device: str
    state: Literal["alive", "leaving", "gone"]
    reachability: Reach
    role: Literal["seed", "gateway", "volunteer", "visitor", ""] = ""  # what it was started as; "": it does not say
    memory_bytes: int
    free_memory_bytes: int
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    training_tokens_per_s: float | None
    started_at: float
    age_s: float  # since its record was signed
    models: tuple[str, ...]
    runs: tuple[str, ...]
    pause: Literal["", "hours", "budget"] = ""  # why it lends nothing now
    lends_again_at: float | None = None
    paths: dict[str, int] | None = None  # how many peers it is connected to, by path; None: it does not say
    from_here: PathView | None = None  # None: not connected, or the node that looks itself
    is_observer: bool = False  # it is the node that looks


class PresenceView(View):
    """A time in which a node was seen. `until` is None while it is there."""

    since: float
    until: float | None


class NodeDetail(View):
    """One node with what the history knows of it."""

    node: NodeView
    presence: tuple[PresenceView, ...]  # the newest 30 days, oldest first
    uptime_share: float | None  # of the time since it was first seen, at most 30 days
    tokens_trained: int  # in committed steps that this dashboard has seen
    rounds: int
    serving: tuple[ServerView, ...]
    training: tuple[ContributorView, ...]


class ServerView(View):
    """One server of a model's blocks `[start, end)`."""

    peer_id: str
    name: str  # the node's, or the peer id's end while the node is not known
    model: str
    start: int
    end: int
    state: Literal["joining", "serving", "draining"]
    queue_depth: int
    free_kv_tokens: int
    prefill_ms_per_token: float
    decode_ms_per_block: float
    tokens_per_s: float | None  # that it computed of late; None: its version does not say
    relayed: bool
    next_start: int | None  # where it is about to move
    next_end: int | None
    age_s: float
    convicted: str | None = None  # of what evidence that was checked here convicts it; clients do not ask it then


class SpanView(View):
    """The blocks `[start, end)` that one server of a chain computes."""

    peer_id: str
    name: str
    start: int
    end: int


class ChainView(View):
    """The spans that a new session would use now, and what a token costs in them.

    `assumed_ms` is the part of `ms_per_token` that is not measured: for links whose round trip nobody knows.
    """

    spans: tuple[SpanView, ...]
    ms_per_token: float
    assumed_ms: float = 0.0


class RevisionView(View):
    """Other weights that are served under a model's name. `is_whole`: they answer, too."""

    revision: str
    num_servers: int
    is_whole: bool


class ModelView(View):
    """One model of the network, with its health.

    All but `other_revisions` is of one revision: the one with the fewest blocks missing, then with the most servers.
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
    publisher: str | None = None  # peer id of its signer, once the signature was checked


class ModelDetail(View):
    """One model with its servers, and the chains that would answer a request."""

    model: ModelView
    servers: tuple[ServerView, ...]  # by start, then end
    replicas: tuple[int, ...]  # per block
    chains: tuple[ChainView, ...]  # the cheapest, then others without a common server


class StepView(View):
    """A committed outer step. What only members know is None where no record had it in time."""

    outer_step: int
    at: float  # when it was seen here
    loss: float
    digest: str
    num_members: int  # of its group, those that contributed nothing included
    num_tokens: int
    seconds: float | None  # since the step before
    phases_s: dict[str, float]  # duration by phase, the group's median: interval, group, reduce, commit, apply
    bytes_per_parameter: float | None  # sent by a member, the group's median
    validation_loss: float | None = None  # of the state after it on held-out data, the group's median


class RefusalView(View):
    """A contribution that a member refused, and why, in its words."""

    outer_step: int
    at: float
    peer_id: str
    name: str
    by_peer_id: str
    reason: str


class BanView(View):
    """A member that is kept out of the run's rounds, since evidence that was checked here proves that it lied.

    `until` is the last outer step of which it is kept out; None: of all.
    """

    peer_id: str
    name: str
    outer_step: int
    kind: str
    reason: str
    until: int | None


class ContributorView(View):
    """One peer that trains a run, or has contributed to it."""

    peer_id: str
    name: str
    run: str
    state: Literal["joining", "training", "finished", "leaving", "gone"]
    outer_step: int
    tokens_per_s: float | None
    tokens: int  # in the committed steps seen here
    rounds: int  # likewise
    uptime_s: float | None  # since this dashboard first saw it in the run
    held_out_score: float | None = None  # what its work does to the held-out loss, in nats a step, as members say


class RunView(View):
    """One run. `name` and the numbers of its file are None until a member has given the signed file.

    `remembered` is the time at which it was last seen, where nobody trains it any more and only the history knows it.
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
    num_agreeing: int  # members at the newest committed step whose digest is the committed one
    num_at_step: int  # members that say that they are at that step
    digest: str
    tokens_per_s: float | None
    projected_end: float | None
    remembered: float | None = None
    endorsed_step: int | None = None  # that the author has endorsed, the newest, verified here; 0: none was seen
    num_on_probation: int | None = None  # of those that took part in the newest step whose proof was seen here
    num_trainers: int | None = None  # that took part in it
    entrance: str | None = None  # who may join, and what invitations are good for, in words
    needs_invitation: bool = False  # nobody else may join but peers that the run names
    slow_links: tuple[str, ...] = ()  # members and links that are slower than the others', in words


class CheckpointFile(View):
    """One file of a run's newest checkpoint, and where to download it."""

    name: str
    num_bytes: int
    url: str


class RunDetail(View):
    """One run with its steps, its contributors and what they refused."""

    run: RunView
    num_parameters: int | None
    steps: tuple[StepView, ...]  # oldest first, downsampled to at most 500
    refusals: tuple[RefusalView, ...]  # newest first, at most 100
    contributors: tuple[ContributorView, ...]  # most tokens first
    checkpoint: tuple[CheckpointFile, ...]
    bans: tuple[BanView, ...] = ()  # newest first, at most 100


class ChangeEvent(View):
    """A line of the log of what changed: a node that came or went, a model that became whole, a run's step."""

    at: float
    kind: Literal["join", "leave", "model", "run"]
    peer_id: str | None
    words: str


class Series(View):
    """One number over time, evenly spaced; None where nothing was known."""

    name: str
    unit: str
    start: float
    step_s: float
    values: tuple[float | None, ...]


class Overview(View):
    """`at` is when the records were last looked at; `stale` says why figures are old or missing."""

    at: float
    stale: str | None
    network_id: str
    version: str
    num_nodes: int  # alive, with seeds, gateways and dashboards
    num_volunteers: int  # of them, those that serve, train or wait for work
    nodes_by_state: dict[str, int]  # alive, leaving
    nodes_by_reachability: dict[str, int]
    paths: dict[str, int] = {}  # connections by path, as nodes count them: those between two of them twice
    models: tuple[ModelView, ...]
    runs: tuple[RunView, ...]
    tokens_per_s: float | None  # answered, over all models
    training_tokens_per_s: float | None  # trained, over all runs
    first_token_p50_s: float | None  # of the gateways' requests of the last minutes
    first_token_p95_s: float | None
    joins_24h: int | None  # null while the history has not been read
    leaves_24h: int | None
    turnover_since: float | None = None  # when these counts begin, if the history is younger than 24 hours
    happenings: tuple[ChangeEvent, ...]  # newest first, at most 20
    join_command: str
    num_paused: int = 0  # volunteers that lend nothing now
    lends_again_at: float | None = None  # when the first of them does


class ViewSource(Protocol):
    """The source of the newest views, held in memory, for the API, the pages, the live events and `top`.

    Nothing here asks a peer: a visitor costs no lookup. What needs the history is awaited. An unknown name returns
    None.
    """

    def overview(self) -> Overview: ...

    def model(self, name: str) -> ModelDetail | None: ...

    async def run(self, run_id: str) -> RunDetail | None:
        """Return a run by its id."""
        ...

    def nodes(self) -> tuple[NodeView, ...]:
        """Return all nodes, by name, then peer id."""
        ...

    async def node(self, peer_id: str) -> NodeDetail | None: ...

    async def series(self, name: str, hours: float) -> Series | None:
        """Return the newest `hours` of a number by its name; `/api/v1/series` says which names there are."""
        ...

    async def wait_changed(self) -> None:
        """Wait until the collector has polled once more. Even then everything may be as it was."""
        ...
