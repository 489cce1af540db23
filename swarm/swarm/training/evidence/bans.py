"""The banned members of a run: for each the verdict, its evidence, and the last outer step of the ban.

A ban follows from evidence and the run's `ban_steps` alone, so all members with the same evidence have the same bans. A
member that lies again is banned from its newest lie on. Beyond MAX_BANS, or MAX_HELD_EVIDENCE_BYTES of evidence in all,
the bans of the earliest lies are dropped. Values only; the owner passes the run's step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from swarm_protocol import limits
from swarm_protocol.errors import PeerViolation

from swarm.training.run.run_config import RunConfig
from swarm.training.state.proof_reader import MAX_HELD_EVIDENCE_BYTES

MAX_STRANGERS = 32
"""Bans that are kept of peers in no state, group or lease that this member knows."""
MAX_STRANGE_BYTES = 1 << 20
"""Maximum size of evidence against one of these, which bounds how many other bans it can displace."""

MAX_IGNORED = 1024
"""Maximum peers that are ignored because their evidence proved nothing: each liar may come with new keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The finding of evidence of `kind`: `peer_id` lied at outer step `step`. `reason` says how, in words."""

    peer_id: str
    step: int
    kind: str
    reason: str


class UnprovenToOutsiders(PeerViolation):
    """Evidence may convict for members that were there, but proves nothing to anyone without the run's history.
    The member that shows it may be honest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ban:
    """`data` is the encoded evidence for `verdict`. `until` is the last outer step of the ban; None: it is
    permanent."""

    verdict: Verdict
    data: bytes
    until: int | None

    def holds_at(self, step: int) -> bool:
        return self.until is None or step <= self.until


class Bans:
    """The bans of a run with this `config`."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._bans: dict[str, Ban] = {}

    def is_news(self, peer: str, step: int) -> bool:
        """Return whether a lie of `peer` at `step` would ban it, or extend its ban."""
        return peer not in self._bans or (self._bans[peer].until is not None and step > self._bans[peer].verdict.step)

    def has_room_for(self, peer: str, size: int, known: Collection[str]) -> bool:
        """Return whether evidence of `size` bytes against `peer` is worth a check. Anyone can make keys that convict
        themselves, so only a few bans of peers that are not `known` are kept: they may have been members earlier than
        this one."""
        return peer in known or (size <= MAX_STRANGE_BYTES and len(self.held.difference(known)) < MAX_STRANGERS)

    def add(self, verdict: Verdict, data: bytes) -> Ban:
        """Ban the peer of `verdict`, which the evidence `data` proves."""
        until = self._config.ban_steps and verdict.step + self._config.ban_steps
        ban = Ban(verdict=verdict, data=data, until=until or None)
        self._bans.pop(verdict.peer_id, None)
        self._bans[verdict.peer_id] = ban
        while len(self._bans) > limits.MAX_BANS or self._num_bytes > MAX_HELD_EVIDENCE_BYTES:
            del self._bans[min(self._bans, key=lambda peer: self._bans[peer].verdict.step)]
        return ban

    @property
    def held(self) -> frozenset[str]:
        """All peers with a ban, including bans that have ended and are not forgotten yet."""
        return frozenset(self._bans)

    def at(self, step: int) -> tuple[Ban, ...]:
        """Return the bans that hold in the round of outer step `step`, newest last."""
        return tuple(ban for ban in self._bans.values() if ban.holds_at(step))

    def peers(self, step: int) -> frozenset[str]:
        """Return the peers that are banned in the round of outer step `step`."""
        return frozenset(ban.verdict.peer_id for ban in self.at(step))

    def lapse(self, step: int) -> frozenset[str]:
        """Forget the bans that have ended before `step`, and return their peers."""
        lapsed = {peer for peer, ban in self._bans.items() if not ban.holds_at(step)}
        for peer in lapsed:
            del self._bans[peer]
        return frozenset(lapsed)

    def unknown_to(self, known: Iterable[str], step: int) -> tuple[Ban, ...]:
        """Return the bans at `step` of peers that are not among `known`."""
        held = frozenset(known)
        return tuple(ban for ban in self.at(step) if ban.verdict.peer_id not in held)

    @property
    def _num_bytes(self) -> int:
        return sum(len(ban.data) for ban in self._bans.values())


def how_long(until: int | None) -> str:
    """Return the end of a ban in words."""
    return "for good" if until is None else f"until outer step {until}"
