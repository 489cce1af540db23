"""Records what happened to one request: which servers answered, how long each took, and what had to be replayed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from swarm.serving.sampling.sampling import OWN_DEFAULTS, Sampling


@dataclass(slots=True, kw_only=True)
class HopTrace:
    """One server's part. Milliseconds are sums over `num_steps` steps of one token each.

    `wire_ms` is the time that was neither compute nor queue. It is known for the whole chain only, and split equally.
    `prompt_ms` is the time of the steps of several tokens, counted from when they were sent. Neither includes positions
    that were run again in place of another server, which `Replay` reports. `is_replaced` is set once another server has
    taken over its blocks.
    """

    peer_id: str
    start: int
    end: int
    num_steps: int = 0
    compute_ms: float = 0.0
    queue_ms: float = 0.0
    wire_ms: float = 0.0
    prompt_ms: float = 0.0
    is_replaced: bool = False

    def step(self, compute_ms: float, queue_ms: float) -> None:
        self.num_steps += 1
        self.compute_ms += compute_ms
        self.queue_ms += queue_ms

    @property
    def ms_per_step(self) -> float:
        return (self.compute_ms + self.queue_ms + self.wire_ms) / max(self.num_steps, 1)


@dataclass(slots=True, kw_only=True)
class Replay:
    """A move of blocks `[start, end)` from `lost_peer` to `new_peers`, which ran `num_tokens` again, or took over keys
    and values.

    `failover_ms` is the time from sending the failed step until the answer continued.
    """

    lost_peer: str
    start: int
    end: int
    reason: str
    new_peers: tuple[str, ...]
    num_tokens: int
    failover_ms: float = 0.0
    was_handed_over: bool = False


@dataclass(slots=True, kw_only=True)
class Trace:
    """The trace of one request, which grows while it runs. `hops` includes servers that were replaced. `sampling` has
    the model's own values of what the request left out.

    `num_reused_tokens` of the prompt were on the servers already. `codec_error` is the largest error that a server
    reported, relative to the root mean square of the activations. Finding servers and tokenizer took `opening_ms`; the
    other times count from then on. `checks` has the report of each span that was checked afterwards (`CheckReport`);
    most answers are not checked.
    """

    model: str
    revision: str = ""
    session_id: str = ""
    sampling: Sampling | None = None
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_reused_tokens: int = 0
    codec: str = ""
    codec_error: float = 0.0
    opening_ms: float = 0.0
    first_token_ms: float = 0.0
    total_ms: float = 0.0
    hops: list[HopTrace] = field(default_factory=list)
    replays: list[Replay] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failover_ms(self) -> float:
        """The longest pause for a failover, 0 without one."""
        return max((replay.failover_ms for replay in self.replays), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values under the names of the fields, with `ms_per_step` for each hop and `failover_ms`. Of
        `sampling` it has the options of which a model may have its own values."""
        hops = [{**asdict(hop), "ms_per_step": hop.ms_per_step} for hop in self.hops]
        sampling = {name: getattr(self.sampling, name) for name in OWN_DEFAULTS} if self.sampling else {}
        return {**asdict(self), "sampling": sampling, "hops": hops, "failover_ms": self.failover_ms}
