"""`swarm-node status`, `drain`, `stop` and `identity`: the daemon and the identity of this home."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from swarm.training.trainer_events import OtherHistory
from swarm_protocol.control_messages import RelayStatus, ServingStatus, SpotCheckStatus, StatusReply, TrainingStatus
from swarm_protocol.errors import ConfigError, PeerTimeout
from swarm_protocol.identity import Identity, short_id
from swarm_protocol.version import version_text

from swarm_node.commands.command_options import Flags
from swarm_node.events.emitter import Emitter
from swarm_node.formatting import (
    PAUSES,
    bit_rate,
    clean,
    decimal_size,
    duration,
    lends_again,
    path_counts,
    plural,
    reach,
    round_trip,
)
from swarm_node.storage.home import Home

if TYPE_CHECKING:
    from swarm_node.control import ControlClient

MARGIN_S = 10.0  # time to close, after the grace period of work in flight
POLL_S = 0.05
MAX_SHOWN_PEERS = 16
"""Peers in the text of `status`. Its JSON has more."""
MAX_NAME_CELLS = 24


def identity(flags: Flags) -> int:
    home = Home(flags.resolve().home)
    if flags.options["new"]:
        home.create()
        Identity.generate().save(home.identity)
    elif not os.path.lexists(home.identity):
        remedy = f"create one: swarm-node identity --new --home {shlex.quote(str(home.path))}"
        raise ConfigError(f"there is no identity in {home.path}", remedy=remedy)
    peer_id = Identity.load(home.identity).peer_id
    emitter = Emitter(json=flags.json)
    if flags.json:
        emitter.emit("identity", peer_id=peer_id, path=str(home.identity), created=flags.options["new"])
    else:
        emitter.result(peer_id)
    return 0


def _client(home: Home, emitter: Emitter) -> ControlClient:
    from swarm_node.control import ControlClient  # noqa: PLC0415 - gRPC, which `identity` does not need

    return ControlClient(home, emitter.say)


def drain(flags: Flags) -> int:
    return _leave(flags, is_drain=True)


def stop(flags: Flags) -> int:
    return _leave(flags, is_drain=False)


def _leave(flags: Flags, *, is_drain: bool) -> int:
    home = Home(flags.home())
    emitter = Emitter(json=flags.json)
    reply = _client(home, emitter).leave(drain=is_drain)
    emitter.emit("leaving", pid=reply.pid, seconds=reply.seconds)
    until = time.monotonic() + reply.seconds + MARGIN_S
    while home.owner() == reply.pid:
        if time.monotonic() > until:
            raise PeerTimeout(f"the daemon (pid {reply.pid}) is still running", remedy=f"end it: kill -9 {reply.pid}")
        time.sleep(POLL_S)
    emitter.emit("left", pid=reply.pid)
    return 0


def status(flags: Flags) -> int:
    emitter = Emitter(json=flags.json)
    reply = _client(Home(flags.home()), emitter).status()
    if flags.json:
        shown = {
            "reachability": reach(reply.reachability, reply.addrs),
            "paths": reply.paths and reply.paths.by_kind(),
        }
        emitter.emit("status", **{**asdict(reply, dict_factory=_rounded), **shown})
    else:
        emitter.result(text(reply))
    return 0


def _rounded(items: Iterable[tuple[str, object]]) -> dict[str, object]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in items}


def text(reply: StatusReply) -> str:
    """Return the status for a terminal, one line for each fact."""
    lines: dict[str, str | Sequence[str]] = {
        "node": f"{reply.name}  {reply.peer_id}",
        "state": f"{_state(reply)}, up {duration(reply.uptime_s)}{_pause(reply)}",
        **_limit_lines(reply),
        **(_training_lines(reply.training) if reply.training else {}),
        "serving": _serving(reply.serving) if reply.serving else "",
        "checks": _checks(reply.spot_checks) if reply.spot_checks else "",
        "not used": reply.convicted_servers,
        "network": _network(reply),
        "peers": tuple(_peers(reply)),
        "relaying": _relaying(reply.relaying) if reply.relaying else "",
        "address": reply.addrs or "none yet",
        "process": f"pid {reply.pid}, {reply.memory_bytes / 2**20:.0f} MiB, version "
        + version_text(reply.version, reply.protocol_version),
    }
    below = "\n" + 11 * " "
    return "\n".join(
        f"{title:<10} {line if isinstance(line, str) else below.join(line)}" for title, line in lines.items() if line
    )


def _network(reply: StatusReply) -> str:
    if not reply.num_peers:  # a node counts itself once it has joined
        return f"{reply.network_id}, not joined yet" + (f": {reply.not_joined}" if reply.not_joined else "")
    live, reached = plural(reply.num_peers, "node"), reach(reply.reachability, reply.addrs)
    return f"{reply.network_id}, {live} live, reachability {reached}"


def _limit_lines(reply: StatusReply) -> dict[str, str]:
    """Return how much of its limits the node uses, and its lending hours. During a break, the line `state` has the next
    time."""
    limits, budget_bytes = reply.limits, reply.month_budget_bytes
    traffic = f"{decimal_size(reply.month_bytes)} of {decimal_size(budget_bytes)} used in this month"
    hours = ", ".join(limits.hours) if limits else ""
    return {
        "upload": _use(limits.upload_bytes_per_s, limits.max_upload_bytes_per_s) if limits else "",
        "download": _use(limits.download_bytes_per_s, limits.max_download_bytes_per_s) if limits else "",
        "traffic": traffic if budget_bytes else "",
        "hours": f"{hours}{'' if reply.pause else ', lending now'}" if hours else "",
    }


def _training_lines(training: TrainingStatus) -> dict[str, str | Sequence[str]]:
    return {
        "training": _training(training),
        "probation": _probation(training),
        "entered": training.entered,
        "held out": training.held_out,
        "endorsed": _endorsed(training),
        "history": training.other_history and (training.other_history, OtherHistory.remedy),
        "convicted": training.convicted,
        "links": training.slow_links,
    }


def _serving(serving: ServingStatus) -> str:
    speed = f"{plural(serving.num_sessions, 'session')}, {serving.tokens_per_s:.1f} tokens/s"
    return f"blocks {serving.start}:{serving.end} of {serving.model}, {speed}"


def _pause(reply: StatusReply) -> str:
    if not reply.pause:
        return ""
    return f"; {PAUSES[reply.pause]}: {lends_again(reply.lends_again_at, time.time())}"


def _probation(training: TrainingStatus) -> str:
    if not training.steps_left:
        return ""
    left, steps = training.steps_left, training.probation_steps
    return f"on probation: {left} of {plural(steps, 'outer step')} left until this node counts fully"


def _endorsed(training: TrainingStatus) -> str:
    if not training.endorsed_step:
        return ""
    if training.endorses_other:
        return f"the run's author endorsed another state at outer step {training.endorsed_step:,} than this node has"
    return f"by the run's author up to outer step {training.endorsed_step:,}"


def _use(bytes_per_s: float, max_bytes_per_s: int) -> str:
    limit = f"at most {bit_rate(max_bytes_per_s)}" if max_bytes_per_s else "no limit"
    return f"{bit_rate(bytes_per_s)} now, {limit}"


def _peers(reply: StatusReply) -> Iterator[str]:
    """Yield one line about all connected peers, then one for each of the first MAX_SHOWN_PEERS."""
    if reply.paths is None:  # an older daemon
        return
    counts = reply.paths.by_kind()
    num = sum(counts.values())
    yield f"{num:,} connected: {path_counts(counts)}" if num else "none connected"
    for peer in reply.peers[:MAX_SHOWN_PEERS]:
        sent, received = decimal_size(peer.sent_bytes), decimal_size(peer.received_bytes)
        how = f"{peer.path:<12}  {round_trip(peer.rtt_ms):>7}"
        moved = f"{sent:>8} sent  {received:>8} received"
        yield f"{short_id(peer.peer_id)}  {how}  {moved}  {clean(peer.name, MAX_NAME_CELLS)}".rstrip()
    if (more := sum(counts.values()) - min(len(reply.peers), MAX_SHOWN_PEERS)) > 0:
        yield f"and {plural(more, 'more peer')} with less traffic"


def _relaying(relay: RelayStatus) -> str:
    carried = f"{plural(relay.num_circuits, 'connection')} now, {decimal_size(relay.relayed_bytes)} carried"
    trouble = f"{relay.num_refused:,} refused, {duration(relay.throttled_s)} throttled"
    return f"for {plural(relay.num_reservations, 'node')}: {carried}, {trouble}"


def _checks(checks: SpotCheckStatus) -> str:
    counts = f"{checks.num_passed:,} spans passed, {checks.num_failed:,} failed, {checks.num_disputed:,} disputed"
    barred = ", ".join(short_id(peer_id) for peer_id in checks.barred)
    return f"{counts}, {checks.num_unchecked:,} unchecked{f'; not used any more: {barred}' if barred else ''}"


def _state(reply: StatusReply) -> str:
    return "waiting" if reply.state == "training" and reply.training and _waits(reply.training) else reply.state


def _waits(training: TrainingStatus) -> bool:
    """Return whether the node waits for long. Waits below a second occur between two intervals of every round."""
    return bool(training.waits_for) and training.waits_s >= 1


def _training(training: TrainingStatus) -> str:
    loss = "" if training.loss is None else f", loss {training.loss:.3f}"
    step = f"outer step {training.outer_step} of {training.num_outer_steps}"
    waiting = f"waits for {training.waits_for} for {duration(training.waits_s)}"
    # the node may not have trained yet
    speed = f"{training.tokens_per_s:.0f} tokens/s here" if training.tokens_per_s else ""
    return ", ".join(filter(None, (training.run, f"{step}{loss}", waiting if _waits(training) else speed)))
