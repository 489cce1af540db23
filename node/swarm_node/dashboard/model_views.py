"""Describes how a model is served, in words and numbers. Pure: it turns records into views, and the router chooses the
chains."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from statistics import median

import numpy as np
from swarm.router.revisions import Revision, revisions
from swarm.router.routing import DEFAULT_RTT_MS, NoChain, RoutingContext, find_chain, runs
from swarm_protocol.identity import short_id
from swarm_protocol.records import ServeRecord

from swarm_node.dashboard.views import ChainView, ModelDetail, ModelView, RevisionView, ServerView, SpanView
from swarm_node.formatting import blocks, is_single_block, plural, shown
from swarm_node.network_snapshot import Listed

MAX_CHAINS = 4
"""Chains shown for one model: the cheapest, then others that share no server with earlier ones."""

MAX_OTHER_REVISIONS = 8

Names = Mapping[str, str]
"""Printable names of nodes, by peer id."""

Spans = tuple[tuple[int, int], ...]


def model_detail(
    model: str,
    listed: Listed[ServeRecord],
    names: Names,
    rtts_ms: Mapping[str, float],
    *,
    publishers: Mapping[bytes, str],
    convicted: Mapping[str, str],
    unreachable: Collection[str],
) -> ModelDetail | None:
    """Return the views of the model's best served revision, or None if nobody serves any of it.

    `publishers` maps manifest digests to peer ids. `convicted` maps convicted servers to what they are convicted of:
    they are listed but not counted, since clients that hold the evidence avoid them. Nor are the `unreachable` ones,
    which a gateway here failed to reach.
    """
    not_counted = {*convicted, *unreachable}
    found = revisions(listed.records, not_counted)
    if not found:
        return None
    all_servers, num_blocks = found[0].servers, found[0].num_blocks
    servers = {peer_id: record for peer_id, record in all_servers.items() if peer_id not in not_counted}
    changes = np.zeros(num_blocks + 1, dtype=np.int64)
    for record in servers.values():
        if record.state == "serving":
            changes[record.start] += 1
            changes[record.end] -= 1
    replicas = np.cumsum(changes[:-1]).tolist()
    missing = found[0].missing(not_counted)
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
        manifest=found[0].manifest.hex() or None,
        publisher=publishers.get(found[0].manifest),
    )
    views = (
        server_view(peer_id, listed, names, convicted, unreachable=peer_id in unreachable) for peer_id in all_servers
    )
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


def server_view(
    peer_id: str, listed: Listed[ServeRecord], names: Names, convicted: Mapping[str, str], *, unreachable: bool = False
) -> ServerView:
    """Return the view of one of the `listed` servers."""
    record = listed.records[peer_id]
    moves = record.next_end > 0
    return ServerView.of(
        record,
        peer_id=peer_id,
        name=names.get(peer_id) or short_id(peer_id),
        model=shown(record.model),
        next_start=record.next_start if moves else None,
        next_end=record.next_end if moves else None,
        age_s=listed.age_s(peer_id),
        convicted=convicted.get(peer_id),
        unreachable=unreachable,
    )


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
    """Return the model's speed: the median over its blocks, so that a few servers cannot set it.

    Every token passes each block once, so the servers of any one block together report the whole speed. None if no
    server reports its speed.
    """
    known = [record for record in servers.values() if record.tokens_per_s is not None]
    if not known:
        return None
    rate_B = np.zeros(num_blocks)
    for record in known:
        rate_B[record.start : record.end] += record.tokens_per_s or 0.0
    return float(median(rate_B.tolist()))


def _chains(
    servers: Mapping[str, ServeRecord], num_blocks: int, names: Names, rtts_ms: Mapping[str, float]
) -> tuple[ChainView, ...]:
    """Return the chains that a client on this node would find, using the round trips that this node knows."""
    used: set[str] = set()
    found: list[ChainView] = []
    while len(found) < MAX_CHAINS:
        try:
            chain = find_chain(servers, 0, num_blocks, RoutingContext(rtt_ms=rtts_ms, load={}, barred=used))
        except NoChain:
            break
        used.update(hop.peer_id for hop in chain.hops)
        spans = tuple(SpanView.of(hop, name=names.get(hop.peer_id) or short_id(hop.peer_id)) for hop in chain.hops)
        peers = [hop.peer_id for hop in chain.hops]
        # links without a measured round trip, for which `find_chain` assumed one; a token takes each link one way
        num_assumed = sum(end not in rtts_ms for end in (peers[0], peers[-1]))
        num_assumed += sum(a not in servers[b].rtt_ms and b not in servers[a].rtt_ms for a, b in pairwise(peers))
        assumed_ms = num_assumed * DEFAULT_RTT_MS / 2
        found.append(ChainView(spans=spans, ms_per_token=chain.cost_ms, assumed_ms=assumed_ms))
    return tuple(found)
