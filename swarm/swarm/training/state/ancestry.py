"""Decides whether a certificate follows from a trusted state, and what a newcomer trusts first.

A member trusts its own state. A process without a state trusts the newest endorsement of the run's author. A
certificate follows from a trusted state if enough of that state's members voted for it, or if its holder shows links
that lead to it: enough members of each link voted for the next one. The links may also begin at a later resume order of
the run's author.

No state. `state_sync` decides for members, `observer` and `resume` for processes that only look.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from swarm_protocol import limits
from swarm_protocol.commit_messages import Certificate, Endorsement, ResumeOrder
from swarm_protocol.errors import SwarmError
from swarm_protocol.identity import short_id
from swarm_protocol.member_messages import StandingRequest
from swarm_protocol.records import TrainerRecord

from swarm.training.state.certificate_history import (
    MAX_ASKED_FOR_STANDING,
    Proof,
    Rank,
    in_own_order,
    most_supported,
    whom_to_ask,
)
from swarm.training.state.proof_reader import HISTORY_TIMEOUT_S, ProofReader

logger = logging.getLogger(__name__)

MAX_SOUGHT = 256
"""Maximum peers that claim an endorsement and are asked for it. One honest peer among them is enough."""
LATE_S = 5.0
"""Time after which other peers with the same state are asked, too, to show how it follows."""
STRANGERS_S = 3 * LATE_S
"""Time for states that no trusted peer shows, once another state follows. Eight peers of one are asked in it."""
NUM_SOUGHT_AT_ONCE = 2 * MAX_ASKED_FOR_STANDING
"""Peers that are asked at a time, until one shows an endorsement. Usually one of the first does."""

T = TypeVar("T")
Follows: TypeAlias = Callable[[str, Proof], Coroutine[Any, Any, bool]]
"""`follows(peer, proof)` returns whether `proof`, which `peer` shows, follows from what is trusted. It may ask the peer
for its history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """A trusted state. Certificates of higher rank than `rank` follow from it if one of `rosters` leads to them.
    `sequence` is that of the last resume order before it (0: none), and `order` that order itself, if known."""

    rosters: tuple[tuple[str, ...], ...]
    rank: Rank
    outer_step: int
    sequence: int = 0
    order: ResumeOrder | None = None
    digest: bytes = b""

    @classmethod
    def at(cls, endorsement: Endorsement) -> Anchor:
        """Return the anchor of an endorsement. No other state at the same place follows from it."""
        last_at_its_place = limits.MAX_GROUP_MEMBERS + 1
        return cls(
            rosters=(endorsement.roster,),
            rank=(
                endorsement.order_sequence,
                endorsement.outer_step,
                endorsement.next_attempt,
                last_at_its_place,
                b"",
            ),
            outer_step=endorsement.outer_step,
            sequence=endorsement.order_sequence,
            digest=endorsement.state_digest,
        )

    @classmethod
    def of_order(cls, order: Proof) -> Anchor:
        return cls(
            rosters=(order.roster,),
            rank=order.rank,
            outer_step=order.outer_step,
            sequence=order.sequence,
            order=order.order,
        )

    def is_of(self, proof: Proof) -> bool:
        """Return whether this is the endorsed state that `proof` certifies. The digest alone does not say so: strangers
        and lying members can vote for it in a group of their own, too."""
        mine = (self.digest, self.sequence, self.outer_step, self.rosters[:1])
        shown = (proof.outcome.state_digest, proof.sequence, proof.outer_step, (proof.roster,))
        return mine == shown and proof.is_known_to_roster

    def knows_order_of(self, proof: Proof) -> bool:
        """Return whether `proof` has the same last resume order as this state, or both have none."""
        return proof.sequence == self.sequence and (self.order is None or proof.order == self.order)


async def links_from(reader: ProofReader, peer: str, proof: Proof, anchor: Anchor) -> tuple[Proof, ...] | None:
    """Return the links that lead from `anchor`, or from a later resume order of the run's author, to `proof`, which
    `peer` shows. They are empty if `proof` follows directly. None if it does not follow.

    Raises PeerViolation or IntegrityError for an invalid resume order.
    """
    if anchor.is_of(proof):
        return ()
    if not anchor.knows_order_of(proof):
        if proof.sequence <= anchor.sequence:
            logger.warning("%s shows a state without the last resume order of the run's author", short_id(peer))
            return None
        if proof.is_order:
            return ()
        order = Certificate(order=proof.origin.order).to_bytes()
        anchor = Anchor.of_order(reader.signatures.check_certificate(order, reader.network.now()))
    if proof.rank <= anchor.rank:
        logger.warning("%s shows a state that does not come after the trusted one", short_id(peer))
        return None
    return await _links_after(reader, peer, proof, anchor)


async def _links_after(reader: ProofReader, peer: str, proof: Proof, anchor: Anchor) -> tuple[Proof, ...] | None:
    """Return the links from `anchor` to `proof`, which has the same order and a higher rank; None if they do not lead
    there."""
    links, is_known = list[Proof](), peer in reader.apart
    if reader.signatures.succession.is_enough_of_any(anchor.rosters, proof.voters):
        return ()
    if anchor.rosters:
        try:
            async with asyncio.timeout(HISTORY_TIMEOUT_S):
                links = await _walk(reader, peer, proof, anchor)
        except (SwarmError, TimeoutError) as error:
            logger.warning("%s does not show how its state follows from the trusted one: %s", short_id(peer), error)
            return None
    if not links and not is_known:
        logger.warning("%s shows a state that does not follow from the trusted one", short_id(peer))
    return tuple(links) or None


async def _walk(reader: ProofReader, peer: str, proof: Proof, anchor: Anchor) -> list[Proof]:
    """Return the links from `anchor` to the one before `proof`; empty if they do not lead there."""
    succession, links, rosters, rank = reader.signatures.succession, list[Proof](), anchor.rosters, anchor.rank
    shown = False
    async with aclosing(reader.history(peer, StandingRequest(run=reader.run, step=anchor.outer_step + 1))) as history:
        async for link in history:
            if not shown:
                reader.note_apart(peer, link)
            shown = True
            if rank < link.rank < proof.rank and succession.is_enough_of_any(rosters, link.voters):
                rosters, rank = (link.roster,), link.rank
                links.append(link)
                if succession.is_enough(link.roster, proof.voters):
                    reader.apart.pop(peer, None)
                    return links
    return []


async def seek_endorsement(reader: ProofReader, records: Mapping[str, TrainerRecord]) -> None:
    """If no endorsement is known, ask the trainers whose records claim one, until one shows it.

    One answer is enough, so that many keys without an endorsement cannot hide it.
    """
    me, admits = reader.signatures.identity.peer_id, reader.signatures.admits
    holders = [peer for peer, each in records.items() if each.endorsed_step and peer != me and admits(peer)]
    holders = in_own_order(holders, me)[:MAX_SOUGHT]
    request = StandingRequest(run=reader.run, step=1, watches=True)

    async def ask(peer: str) -> None:
        with suppress(SwarmError):
            await reader.standing(peer, request)

    while holders and reader.endorsements.newest is None:
        async with asyncio.TaskGroup() as tasks:
            for peer in holders[:NUM_SOUGHT_AT_ONCE]:
                tasks.create_task(ask(peer))
        holders = holders[NUM_SOUGHT_AT_ONCE:]


def whom_a_newcomer_asks(
    peers: Iterable[str], endorsement: Endorsement | None, me: str, chance: random.Random
) -> list[str]:
    """Return the peers that a process without a state asks. One that shows a state after the endorsed one is enough.
    Without an endorsement they are always the same, a sample with about the share of liars that all peers have."""
    if endorsement is None:
        return in_own_order(peers, me)[:MAX_ASKED_FOR_STANDING]
    return whom_to_ask(peers, endorsement.roster, chance)


def best_of(shown: Mapping[str, Proof], endorsement: Endorsement | None) -> Proof | None:
    """Return the proof that a process without a state follows, of those `shown` by peers that `those_endorsed` returns;
    None if there is none. States that follow from the endorsed one are of one history, of which the last one counts."""
    if endorsement is None:
        return most_supported(shown)
    return max(shown.values(), key=lambda proof: proof.rank, default=None)


async def those_endorsed(reader: ProofReader, shown: Mapping[str, Proof]) -> dict[str, Proof]:
    """Return those of the states `shown`, by peer, that are the endorsed state or follow from it; all without an
    endorsement."""
    endorsement = reader.endorsements.newest
    if endorsement is None:
        return dict(shown)
    anchor = Anchor.at(endorsement)

    async def follows(peer: str, proof: Proof) -> bool:
        return await links_from(reader, peer, proof, anchor) is not None

    return await those_following(shown, follows)


async def those_following(
    shown: Mapping[str, Proof], follows: Follows, trusted: Collection[str] = ()
) -> dict[str, Proof]:
    """Return those of the states `shown`, by peer, that `follows` accepts.

    Many peers show one state, and each may have a history of megabytes. Of the peers with the same group, order and
    outcome, one is asked first. Another is asked when one has failed, and as many again when all of them are late.
    Peers with another group are asked separately: strangers could show votes of their own group for the same state.

    All states are waited for. But with `trusted` peers, a state that none of them shows gets only STRANGERS_S once
    another one follows: a caller that goes on with a state of an earlier step catches up from there.
    """
    peers_with = dict[tuple[object, ...], list[str]]()
    for peer, proof in shown.items():
        certificate = Certificate.from_bytes(proof.certificate)
        peers_with.setdefault((certificate.group, certificate.order, certificate.outcome), []).append(peer)
    async with asyncio.TaskGroup() as tasks:
        asking = {
            tasks.create_task(ask_until(peers, lambda peer: follows(peer, shown[peer]))): peers
            for peers in peers_with.values()
        }
        strangers = {task for task, peers in asking.items() if trusted and not set(trusted).intersection(peers)}
        await _wait_for_enough(asking.keys() - strangers, strangers)
        for task in asking:
            task.cancel()
    following = {peer for task, peers in asking.items() if not task.cancelled() and task.result() for peer in peers}
    return {peer: proof for peer, proof in shown.items() if peer in following}


async def _wait_for_enough(trusted: set[asyncio.Task[bool | None]], strangers: set[asyncio.Task[bool | None]]) -> None:
    """Wait for all `trusted` tasks and, once one task has returned True, STRANGERS_S for the others."""
    if trusted:
        await asyncio.wait(trusted)
    is_found, pending = any(task.result() for task in trusted), strangers
    while pending and not is_found:
        ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        is_found = any(task.result() for task in ended)
    if pending:
        await asyncio.wait(pending, timeout=STRANGERS_S)


async def ask_until(
    peers: Sequence[str], ask: Callable[[str], Coroutine[Any, Any, T | None]], *, late_s: float = LATE_S
) -> T | None:
    """Ask `peers` in order until `ask` returns a true value for one, and return that; None if it does for none. Another
    is asked when one has returned another value, and as many again when all of them are late."""
    waiting, asking, num_next = list(peers), set[asyncio.Task[T | None]](), 1
    async with asyncio.TaskGroup() as tasks:
        while waiting or asking:
            asking.update(tasks.create_task(ask(peer)) for peer in waiting[:num_next])
            del waiting[:num_next]
            timeout_s = late_s if waiting else None
            ended, asking = await asyncio.wait(asking, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if found := [result for task in ended if (result := task.result())]:
                for task in asking:
                    task.cancel()
                return found[0]
            # twice as many after each wait: strangers can show a member's certificate, and then be silent
            num_next = 1 if ended else len(asking)
    return None
