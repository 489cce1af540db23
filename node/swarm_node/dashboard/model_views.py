"""How a model is served, in words and numbers. Pure: records in, views out; chains are the router's own choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

import numpy as np
from swarm.router.revisions import Revision, revisions
from swarm.router.routing import DEFAULT_RTT_MS, Chain, NoChain, RoutingContext, find_chain, runs
from swarm_protocol.records import ServeRecord

from swarm_node.dashboard.memo import Made
from swarm_node.dashboard.view_sanitizing import blocks, ending, is_single_block, shown
from swarm_node.dashboard.views import ChainView, ModelDetail, ModelView, RevisionView, ServerView, SpanView
from swarm_node.formatting import plural
from swarm_node.network_snapshot import Listed

MAX_CHAINS = 4
"""Of one model: the cheapest, and others that share no server with those before."""

MAX_OTHER_REVISIONS = 8

Names = Mapping[str, str]
"""Of nodes by peer id, already fit to be shown."""

Spans = tuple[tuple[int, int], ...]


def model_detail(
    model: str,
    listed: Listed[ServeRecord],
    names: Names,
    rtts_ms: Mapping[str, float],
    made: Made[ServeRecord, ServerView],
) -> ModelDetail | None:
    """Of the revision that serves most of the model; None if nobody serves any of it.

    `made` is of the look before, by `server_view`.
    """
    found = revisions(listed.records)
    if not found:
        return None
    servers, num_blocks = found[0].servers, found[0].num_blocks
    replicas = _replicas(servers, num_blocks)
    missing = found[0].missing()
    weakest = int(np.argmin(replicas))
    view = ModelView(
        name=shown(model),
        revision=shown(found[0].digest),
        num_blocks=num_blocks,
        health="incomplete" if missing else "thin" if replicas[weakest] == 1 else "whole",
        words=_words(servers, missing, replicas),
        num_servers=len(servers),
        missing=missing,
        weakest_block=weakest,
        weakest_replicas=replicas[weakest],
        tokens_per_s=_tokens_per_s(servers, num_blocks),
        other_revisions=_other_revisions(found[1:]),
    )
    views = (seen_now(each, names, listed.age_s(peer_id)) for peer_id, each in made.of(servers).items())
    return ModelDetail(
        model=view,
        servers=tuple(sorted(views, key=lambda server: (server.start, server.end, server.name, server.peer_id))),
        replicas=tuple(replicas),
        chains=() if missing else _chains(servers, num_blocks, names, rtts_ms),
    )


def _other_revisions(found: Sequence[Revision]) -> tuple[RevisionView, ...]:
    others = [
        RevisionView(revision=shown(each.digest), num_servers=len(each.servers), is_whole=not each.missing())
        for each in found
    ]
    others.sort(key=lambda other: (-other.num_servers, other.revision))
    return tuple(others[:MAX_OTHER_REVISIONS])


def server_view(peer_id: str, record: ServeRecord) -> ServerView:
    """All that stays as it is until the server signs another record."""
    moves = record.next_end > 0
    return ServerView(
        peer_id=peer_id,
        name=ending(peer_id),
        model=shown(record.model),
        start=record.start,
        end=record.end,
        state=record.state,
        queue_depth=record.queue_depth,
        free_kv_tokens=record.free_kv_tokens,
        prefill_ms_per_token=record.prefill_ms_per_token,
        decode_ms_per_block=record.decode_ms_per_block,
        tokens_per_s=record.tokens_per_s,
        relayed=record.relayed,
        next_start=record.next_start if moves else None,
        next_end=record.next_end if moves else None,
        age_s=0.0,
    )


def seen_now(view: ServerView, names: Names, age_s: float) -> ServerView:
    """With what changes from look to look."""
    return view.model_copy(update={"name": names.get(view.peer_id) or view.name, "age_s": age_s})


def _replicas(servers: Mapping[str, ServeRecord], num_blocks: int) -> list[int]:
    changes = np.zeros(num_blocks + 1, dtype=np.int64)
    for record in servers.values():
        if record.state == "serving":
            changes[record.start] += 1
            changes[record.end] -= 1
    return [int(count) for count in np.cumsum(changes[:-1])]


def _words(servers: Mapping[str, ServeRecord], missing: Spans, replicas: Sequence[int]) -> str:
    num_blocks = len(replicas)
    if missing:
        coming = sum(
            record.state == "joining" and any(record.start < end and start < record.end for start, end in missing)
            for record in servers.values()
        )
        hope = f"; {plural(coming, 'server')} {'is' if coming == 1 else 'are'} loading some of them" if coming else ""
        return f"It cannot answer: nobody serves {blocks(missing, num_blocks)}{hope}."
    single = runs([count == 1 for count in replicas])
    if not single:
        return f"It answers: each of its {plural(num_blocks, 'block')} has {min(replicas)} servers or more."
    if single == ((0, num_blocks),):
        return f"It answers, but each of its {plural(num_blocks, 'block')} has a single server."
    return (
        f"It answers, but {blocks(single, num_blocks)} {'has' if is_single_block(single) else 'have'} a single server."
    )


def _tokens_per_s(servers: Mapping[str, ServeRecord], num_blocks: int) -> float | None:
    """Every token passes each block once, so any block's servers tell it together: the median of what blocks say, which
    no few servers can choose. None if none says."""
    told = [record for record in servers.values() if record.tokens_per_s is not None]
    if not told:
        return None
    rate_B = np.zeros(num_blocks)
    for record in told:
        rate_B[record.start : record.end] += record.tokens_per_s or 0.0
    return float(median(rate_B.tolist()))


def _chains(
    servers: Mapping[str, ServeRecord], num_blocks: int, names: Names, rtts_ms: Mapping[str, float]
) -> tuple[ChainView, ...]:
    """As a client here would find them, with the round trips known here."""
    used: set[str] = set()
    found: list[ChainView] = []
    while len(found) < MAX_CHAINS:
        try:
            chain = find_chain(servers, 0, num_blocks, RoutingContext(rtt_ms=rtts_ms, load={}, barred=used))
        except NoChain:
            break
        used.update(hop.peer_id for hop in chain.hops)
        found.append(_chain_view(chain, names, _assumed_ms([hop.peer_id for hop in chain.hops], servers, rtts_ms)))
    return tuple(found)


def _assumed_ms(chain: Sequence[str], servers: Mapping[str, ServeRecord], rtts_ms: Mapping[str, float]) -> float:
    """What `find_chain` has put in for links without a measured round trip; a token takes each link one way."""
    num_assumed = sum(end not in rtts_ms for end in (chain[0], chain[-1]))
    num_assumed += sum(a not in servers[b].rtt_ms and b not in servers[a].rtt_ms for a, b in pairwise(chain))
    return num_assumed * DEFAULT_RTT_MS / 2


def _chain_view(chain: Chain, names: Names, assumed_ms: float) -> ChainView:
    spans = tuple(
        SpanView(peer_id=hop.peer_id, name=names.get(hop.peer_id) or ending(hop.peer_id), start=hop.start, end=hop.end)
        for hop in chain.hops
    )
    return ChainView(spans=spans, ms_per_token=chain.cost_ms, assumed_ms=assumed_ms)
