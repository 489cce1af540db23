"""Who coordinates an attempt, which members its group takes, and what a member checks of a group that another one
formed.

Pure. `state_machine` decides when; `round_service` and `round_driver` communicate. A coordinator is trusted only to
choose among the members that reported. Every member checks that its own contribution is there unchanged, that nobody's
weight exceeds its lease, that all start from its own state, and that the part sizes follow from the bandwidths in the
group. Each member finds its own bandwidth there, so a coordinator can invent only its own, within MAX_SKEW.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from swarm_protocol.training_messages import Contribution, Group, Ready

from swarm.training.round.round_events import SignedGroup
from swarm.training.round.vote import Succession

MAX_SKEW = 4.0
"""The largest part relative to the usual one, and the usual one relative to the smallest. A member that overstates its
bandwidth does not get the whole vector, and one that understates it is not excused."""

NOISE = 1.5
"""Bandwidths that differ by less count as equal: parts that follow the noise only make the largest one larger."""

PART_ALIGNMENT = 256
"""Parts begin at multiples of this many values, so that the codecs' blocks of one vector and of its parts coincide."""

GRACE_SHARE = 0.25
MAX_GRACE_S = 30.0
"""The grace is this share of an interval, at most MAX_GRACE_S: members that take so much longer than the others are
waited for, as their whole interval is lost otherwise. It is not longer, because members that are gone without a word
are waited for, too."""

NOT_ADMITTED = "the run does not admit it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What is fixed while a member `me` tries to make outer step `step` of `run` from the state `state_digest`.

    `roster` are the members of the committed state; `leased` hold leases of `samples_per_member` samples of
    `tokens_per_sample` tokens for this step. The run admits only the peers of `admission`; empty: anyone. The fragment
    that the step moves has `num_values`. `first_attempt` follows the one that committed the state. Times are in
    seconds: at least `grace_s` after enough members are ready (see `grace_after`), `patience_s` until a coordinator
    says that too few are.
    `bytes_per_s` is this member's bandwidth (see `peer_connections`). `order` is the author's last resume order as it
    was signed, and `sequence` its number; empty and 0 if there was none.
    """

    run: str
    me: str
    step: int
    first_attempt: int
    state_digest: bytes
    roster: tuple[str, ...]
    leased: tuple[str, ...]
    admission: tuple[str, ...]
    min_group: int
    max_group: int
    samples_per_member: int
    tokens_per_sample: int
    num_values: int
    grace_s: float
    patience_s: float
    reduce_s: float
    vote_s: float
    bytes_per_s: int = 0
    majority_after_s: float = 0.0
    sequence: int = 0
    order: bytes = b""

    @property
    def succession(self) -> Succession:
        return Succession(min_group=self.min_group, majority_after_s=self.majority_after_s)

    def admits(self, peer: str) -> bool:
        return not self.admission or peer in self.admission


def coordinator_of(run: str, step: int, attempt: int, candidates: Iterable[str]) -> str:
    """Return the candidate with the lowest hash: another one for each attempt, and the same for all members."""
    return min(candidates, key=lambda peer: hashlib.sha256(f"{run}/{step}/{attempt}/{peer}".encode()).digest())


def grace_after(interval_s: float, least_s: float) -> float:
    """Return how many seconds a round waits for members once enough are there, after an interval that took
    `interval_s`. A run with a `least_s` of 0 waits for nobody."""
    return max(least_s, min(GRACE_SHARE * interval_s, MAX_GRACE_S)) if least_s else 0.0


def fair_shares(bytes_per_s: tuple[int, ...]) -> tuple[float, ...]:
    """Return each owner's share of the work, in proportion to its bandwidth. Bandwidths are claims, so they count
    within MAX_SKEW of their median either way. For an unknown one (0) the median is assumed."""
    known = [each for each in bytes_per_s if each]
    if not known:
        return (1.0,) * len(bytes_per_s)
    usual = statistics.median(known)
    return tuple(_share((each or usual) / usual) for each in bytes_per_s)


def _share(ratio: float) -> float:
    return 1.0 if 1 / NOISE < ratio < NOISE else min(max(ratio, 1 / MAX_SKEW), MAX_SKEW)


def part_values(num_values: int, bandwidths: tuple[float, ...]) -> tuple[int, ...]:
    """Return how many values each owner reduces, in proportion to `bandwidths`. They sum to `num_values`."""
    total, edges, passed = sum(bandwidths), [0], 0.0
    for bandwidth in bandwidths:
        passed += bandwidth
        edge = round(num_values * passed / total / PART_ALIGNMENT) * PART_ALIGNMENT
        edges.append(max(edges[-1], min(edge, num_values)))
    edges[-1] = num_values
    return tuple(stop - start for start, stop in pairwise(edges))


def part_sizes(num_values: int, members: tuple[Contribution, ...]) -> tuple[int, ...]:
    """Return the part size of each of `members`, by the bandwidths they reported. Floating-point arithmetic in a fixed
    order: every member that recomputes it gets the same sizes."""
    return part_values(num_values, fair_shares(tuple(member.bytes_per_s for member in members)))


def form_group(terms: Terms, attempt: int, ready: Mapping[str, Ready]) -> tuple[Group, dict[str, str]]:
    """Return the group of the members that are `ready`, and the reason for each one left out. `terms.me` is always
    taken.

    If a member of the state voted in an earlier attempt, the group resumes the outcome of the latest such vote. The
    votes of other peers do not matter: enough members of the state must have voted for an outcome that was decided.
    """
    left_out = _unfit(terms, attempt, ready)
    fit = {peer: each for peer, each in ready.items() if peer not in left_out}
    # members that contribute go before those that only want to be admitted
    order = sorted(fit, key=lambda peer: (peer != terms.me, fit[peer].num_tokens == 0, peer))
    for peer in order[terms.max_group :]:
        left_out[peer] = f"the group is full with {terms.max_group} members"
    members = tuple(_contribution(peer, fit[peer]) for peer in sorted(order[: terms.max_group]))
    votes = [each for peer, each in fit.items() if each.voted and (peer in terms.roster or not terms.roster)]
    # of two outcomes of one attempt, which takes a damaged member, only the one with most votes can have been decided
    supporters = Counter(each.voted for each in votes)
    latest = max(votes, key=lambda each: (each.voted_attempt, supporters[each.voted]), default=None)
    reduces = latest is None and any(member.num_tokens for member in members)
    group = Group(
        run=terms.run,
        step=terms.step,
        attempt=attempt,
        state_digest=terms.state_digest,
        members=members,
        part_values=part_sizes(terms.num_values, members) if reduces else (),
        reduce_s=terms.reduce_s,
        vote_s=terms.vote_s,
        resumes=latest.voted if latest else None,
        origin=latest.voted_origin if latest else b"",
        order=terms.order,
    )
    return group, left_out


def complaint(terms: Terms, attempt: int, contribution: Contribution | None, signed: SignedGroup) -> str:
    """Return what is wrong with a group for `terms.me`, which offered `contribution`; empty if nothing is."""
    group = signed.group
    checks = (
        ((group.run, group.step, group.attempt) != (terms.run, terms.step, attempt), "it is for another round"),
        (group.state_digest != terms.state_digest, "it starts from another state"),
        (
            reported(terms, contribution) not in group.members,
            "it lacks or changes this member's contribution",
        ),
        (
            group.reduce_s > terms.reduce_s or group.vote_s > terms.vote_s,
            "its deadlines are longer than the run allows",
        ),
    )
    wrong = next((text for is_wrong, text in checks if is_wrong), "") or _forbidden(terms, group)
    if wrong or group.resumes is None:
        return wrong
    wrong = origin_complaint(terms, signed.origin) if signed.origin else "it is not there"
    return f"of the group whose outcome it resumes, {wrong}" if wrong else ""


def origin_complaint(terms: Terms, origin: SignedGroup) -> str:
    """Return why no honest member can have voted in `origin`, a group of this step and state; empty if one can."""
    if terms.roster and origin.signer not in terms.roster:
        return f"{short(origin.signer)} signed it and is no member of the state that it follows from"
    return _forbidden(terms, origin.group)


def reported(terms: Terms, contribution: Contribution | None) -> Contribution:
    """Return what `terms.me` reports with `contribution`; without one it reports only its bandwidth."""
    return replace(contribution or Contribution(peer_id=terms.me), bytes_per_s=terms.bytes_per_s)


def _forbidden(terms: Terms, group: Group) -> str:
    """Return which rule `group` breaks that holds for all groups of this step; empty if none."""
    num_members = len(group.members)
    checks = (
        (group.order != terms.order, "it follows from another resume order of the run's author"),
        (num_members > terms.max_group, f"it has {num_members} members, more than {terms.max_group}"),
        (num_members < terms.min_group, f"it has {num_members} members, fewer than {terms.min_group}"),
        (
            not terms.succession.is_enough(terms.roster, group.peer_ids),
            "it has too few members of the state that it follows from",
        ),
        (not all(map(terms.admits, group.peer_ids)), "it has a member that the run does not admit"),
        (any(_overclaims(terms, member) for member in group.members), "a member claims more than its lease"),
        (
            bool(group.part_values) and group.part_values != part_sizes(terms.num_values, group.members),
            "its part sizes do not follow from the bandwidths that its members reported",
        ),
    )
    return next((text for is_wrong, text in checks if is_wrong), "")


def convict(accusations: Mapping[str, Collection[str]], num_failed: int = 0) -> tuple[str, ...]:
    """Return the peers to leave out of the group, by its members' word alone. `accusations` are by accuser.

    Nothing is proved here, so this takes the peer in most disputes, on either side: a peer that breaks the round for
    all is accused by all, and a peer that accuses all stands alone. In a tie nobody is left out. But if `num_failed`
    attempts at the step have failed, the two may be unable to work with each other. Then the tied peers take turns: by
    a hash, one of them is left out, or none.
    """
    edges = {(by, of) for by, accused in accusations.items() for of in accused if of in accusations and of != by}
    convicted = []
    while edges:
        disputes = Counter(peer for edge in edges for peer in edge)
        most = max(disputes.values())
        worst = sorted(peer for peer in disputes if disputes[peer] == most)
        tied = {edge for edge in edges if set(edge) <= set(worst)}
        alone = [peer for peer in worst if not any(peer in edge for edge in tied)]
        out = alone[0] if alone else _in_turn(worst, num_failed)
        if out:
            convicted.append(out)
            edges = {edge for edge in edges if out not in edge}
        else:
            edges -= tied
    return tuple(convicted)


def _in_turn(tied: list[str], num_failed: int) -> str:
    """Return which of `tied` to leave out of this attempt; empty for none."""
    if not num_failed:
        return ""
    return min(("", *tied), key=lambda peer: hashlib.sha256(f"{num_failed}/{peer}".encode()).digest())


def _unfit(terms: Terms, attempt: int, ready: Mapping[str, Ready]) -> dict[str, str]:
    unfit = {peer: NOT_ADMITTED for peer in ready if not terms.admits(peer)}
    for peer, each in ready.items():
        if peer != terms.me and _overclaims(terms, _contribution(peer, each)):
            unfit[peer] = "it claims more tokens or samples than its lease has"
    honest = {peer: each.accused for peer, each in ready.items() if peer not in unfit}
    own = ready[terms.me].accused if terms.me in ready else ()
    # what this member saw itself counts also in a tie: it signs a group of members that it can work with
    for peer in (*convict(honest, attempt - terms.first_attempt), *(peer for peer in own if peer in honest)):
        if peer != terms.me:
            accusers = [by for by, accused in honest.items() if peer in accused]
            unfit[peer] = f"accused by {', '.join(map(short, accusers)) or 'nobody else, and accuses others'}"
    return unfit


def _contribution(peer: str, ready: Ready) -> Contribution:
    return Contribution(
        peer_id=peer,
        num_tokens=ready.num_tokens,
        num_samples=ready.num_samples,
        loss=ready.loss,
        leaving=ready.leaving,
        bytes_per_s=ready.bytes_per_s,
    )


def _overclaims(terms: Terms, member: Contribution) -> bool:
    allowed = terms.samples_per_member if member.peer_id in terms.leased else 0
    return member.num_samples > allowed or member.num_tokens > member.num_samples * terms.tokens_per_sample


def short(peer_id: str) -> str:
    """Return a peer id's last six characters, which identify peers in messages."""
    return peer_id[-6:]
