"""Standings decide which peers count fully after a committed state, and what the next state remembers of them.

A state keeps leases and probation of a run's trainers, and everything else in its `Register`. Its `credits` remember
proven members. A member earns one credit for each outer step to which it contributes while it counts fully, up to the
run's `absence_steps`, and uses one for each step that is made while it is away. While it has an entry there, it returns
at full weight. So a member that was there for long may be away for long, and a key that has just proven itself is soon
forgotten. Strangers have no entry. Of the members that are away, those with the most credits are kept, so that
newcomers displace nobody who has done more.

Everything follows only from the state, the run's rules and the credentials in a signed group, so that all replicas
compute the same. Values and pure functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from swarm_protocol import limits
from swarm_protocol.checks import check_int
from swarm_protocol.identity import check_peer_id
from swarm_protocol.run_credentials import Grant, RunCredential, RunRevocation, grant_of
from swarm_protocol.training_messages import Group

from swarm.training.standing.entrance import MAX_ALL_REVOKED, MAX_ENTRIES, MAX_SERIALS, Entrance, Entry, Probation

Grants = Mapping[str, Grant]

MAX_AWAY = 1024
"""Maximum members that are remembered while they are away: four full groups, 60 KiB of a state's manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """`credits` are by peer. `entries` name the peers that entered by an invitation or by vouches, the newest last (see
    `entrance`). `uses` counts, by serial, those that entered before these. `revoked` are the serials of invitations,
    and `revoked_inviters` the keys of inviters, that the run's author revoked, the newest last."""

    credits: Mapping[str, int] = field(default_factory=dict)
    entries: tuple[Entry, ...] = ()
    uses: Mapping[int, int] = field(default_factory=dict)
    revoked: tuple[int, ...] = ()
    revoked_inviters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError."""
        for peer, value in self.credits.items():
            check_peer_id(peer)
            check_int(value, "credits", high=limits.MAX_ABSENCE_STEPS)
        # beyond MAX_SERIALS no new serial is honoured, but those of the entries and of one more group still come here
        if len(self.uses) > MAX_SERIALS + MAX_ENTRIES + limits.MAX_CREDENTIALS:
            raise ValueError("the uses are too many")
        for serial, count in self.uses.items():
            check_int(serial, "uses", low=1, high=2**64 - 1)
            check_int(count, "uses", low=1, high=2**53)
        for serial in self.revoked:
            check_int(serial, "revoked", low=1, high=2**64 - 1)
        for peer in self.revoked_inviters:
            check_peer_id(peer)
        if len(self.revoked) > MAX_ALL_REVOKED or len(self.revoked_inviters) > MAX_ALL_REVOKED:
            raise ValueError("the revocations are too many")
        entered = [each.peer_id for each in self.entries]
        if len(entered) > MAX_ENTRIES or len(entered) != len(set(entered)):
            raise ValueError("the entries are too many, or name a peer twice")

    def to_json(self) -> dict[str, Any]:
        """Return the register as a manifest has it: only the fields that are not empty."""
        fields: dict[str, Any] = {
            "credits": sorted(self.credits.items()),
            "entries": [each.to_json() for each in self.entries],
            "uses": [[f"{serial:016x}", count] for serial, count in sorted(self.uses.items())],
            "revoked": [f"{serial:016x}" for serial in self.revoked],
            "revoked_inviters": self.revoked_inviters,
        }
        return {name: value for name, value in fields.items() if value}

    @classmethod
    def from_json(cls, head: Mapping[str, Any]) -> Register:
        """Raises ValueError, TypeError or LookupError."""
        return cls(
            credits=dict(head.get("credits", ())),
            entries=tuple(map(Entry.from_json, head.get("entries", ()))),
            uses={int(serial, 16): count for serial, count in head.get("uses", ())},
            revoked=tuple(int(serial, 16) for serial in head.get("revoked", ())),
            revoked_inviters=tuple(head.get("revoked_inviters", ())),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStandings:
    """The standing of each peer after `outer_step` steps. Of the `known` peers, the trainers of the state, those in
    `left` are on probation for that many more steps. Peers with credits in the `register` are remembered, and count
    fully. Any other peer would start its probation now, with the `entrance`'s steps if its grant is honoured."""

    rule: Probation = field(default_factory=Probation)
    entrance: Entrance = field(default_factory=Entrance)
    left: Mapping[str, int] = field(default_factory=dict)
    known: Collection[str] = ()
    outer_step: int = 0
    register: Register = field(default_factory=Register)

    def is_new(self, peer: str) -> bool:
        """Return whether the state does not know `peer`."""
        return peer not in self.known and peer not in self.register.credits

    def steps_left(self, peer: str, grant: Grant | None = None) -> int:
        """Return the number of steps to which `peer` must contribute before it counts fully; 0: it does. `grant` is
        from the credential that it shows."""
        if not self.is_new(peer):
            return self.left.get(peer, 0)
        newcomer = self.rule.of_newcomer(self.outer_step)
        return min(newcomer, self.entrance.steps) if grant is not None and self._entry(grant) else newcomer

    def refuses(self, peer: str, grant: Grant | None = None) -> bool:
        """Return whether `peer` may not enter the run, because it lacks a required credential."""
        if not self.entrance.required or peer in self.entrance.listed:
            return False
        if not self.is_new(peer):
            return peer in self.put_out
        return grant is None or self._entry(grant) is None

    def why_shut_out(self, grant: Grant) -> str:
        """Return why the invitation of `grant` no longer lets its peer in; empty if it does, or if the peer needs
        none."""
        peer, has_entered = grant.peer_id, any(each.peer_id == grant.peer_id for each in self.register.entries)
        needs_it = self.steps_left(peer, grant) > 0 or self.refuses(peer, grant)
        if not (self.entrance.welcomes and grant.serial and needs_it) or has_entered:
            return ""
        if self._is_revoked(grant):
            return "was revoked by the run's author"
        num_uses = self._num_uses(grant.serial, self.register.entries)
        return f"is used up ({num_uses} of {grant.max_uses})" if num_uses >= grant.max_uses else ""

    def overused(self, grants: Grants) -> list[str]:
        """Return the peers whose grants fail because others of `grants` exhaust an invitation's uses or a voucher's
        budget. Peers enter in the order of their ids."""
        entries, surplus = self.register.entries, []
        for peer in sorted(grants):
            if not self.is_new(peer) or self._entry(grants[peer]) is None:
                continue
            if (entry := self._entry(grants[peer], entries)) is None:
                surplus.append(peer)
            else:
                entries = (*entries, entry)
        return surplus

    def honoured(self, grants: Grants) -> dict[str, Grant]:
        """Return the grants of a group that hold together: all but the `overused` ones."""
        surplus = set(self.overused(grants))
        return {peer: each for peer, each in grants.items() if peer not in surplus}

    def without_refused(self, trainers: Sequence[str], grants: Grants) -> tuple[str, ...]:
        """Return `trainers` without those that the run refuses, given the honoured `grants`."""
        return tuple(peer for peer in trainers if not self.refuses(peer, grants.get(peer)))

    def after(
        self,
        trainers: Collection[str],
        contributors: Collection[str],
        *,
        grants: Grants | None = None,
        demoted: Collection[str] = (),
    ) -> tuple[tuple[str, int], ...]:
        """Return which of `trainers` are on probation after a step of `contributors`, with the steps left, in the order
        of peer ids. The probation of those in `demoted` starts again."""
        shown = grants or {}
        left = {peer: self.steps_left(peer, shown.get(peer)) - (peer in contributors) for peer in trainers}
        left |= {peer: self.rule.of_newcomer(self.outer_step) for peer in left if peer in demoted}
        return tuple((peer, left[peer]) for peer in sorted(left) if left[peer] > 0)

    def register_after(
        self,
        trainers: Collection[str],
        contributors: Collection[str],
        *,
        num_steps: int,
        grants: Grants | None = None,
        demoted: Collection[str] = (),
        revocation: RunRevocation | None = None,
    ) -> Register:
        """Return the register after a round of `num_steps` outer steps, 0 or 1. `trainers` are those of the new
        state."""
        unproven = {peer for peer, _ in self.after(trainers, contributors, grants=grants, demoted=demoted)}
        is_kept = self.rule.steps or self.entrance.required or self.entrance.vouchers
        out = self.put_out
        credit = credits_after(
            {peer: value for peer, value in self.register.credits.items() if peer not in demoted and peer not in out},
            most=self.rule.absence_steps if is_kept else 0,
            proven=set(trainers) - unproven - set(demoted) - out,
            unproven=unproven,
            contributors=contributors,
            num_steps=num_steps,
        )
        serials, inviters = (revocation.serials, revocation.inviters) if revocation else ((), ())
        entries = self._entries_after(trainers, grants or {}, demoted)
        uses = Counter(self.register.uses)
        uses.update(each.serial for each in entries[:-MAX_ENTRIES] if each.serial)
        return Register(
            credits=credit,
            entries=entries[-MAX_ENTRIES:],
            uses=uses,
            revoked=tuple(dict.fromkeys((*self.register.revoked, *serials)))[:MAX_ALL_REVOKED],
            revoked_inviters=tuple(dict.fromkeys((*self.register.revoked_inviters, *inviters)))[:MAX_ALL_REVOKED],
        )

    def _entries_after(self, trainers: Collection[str], grants: Grants, demoted: Collection[str]) -> tuple[Entry, ...]:
        entered = {peer: self._entry(grants[peer]) for peer in sorted(grants) if peer in trainers and self.is_new(peer)}
        entries = [each for each in self.register.entries if each.peer_id not in entered]
        entries += [entry for entry in entered.values() if entry is not None]
        without = (
            replace(each, vouchers=tuple(peer for peer in each.vouchers if peer not in demoted)) for each in entries
        )
        out = self.put_out & set(demoted)
        return tuple(each for each in without if (each.serial or each.vouchers) and each.peer_id not in out)

    def _entry(self, grant: Grant, entries: Sequence[Entry] | None = None) -> Entry | None:
        """Return the entry that `grant` would give its peer, beside the `entries` of others (default: the register's);
        None if the state does not honour it.

        An invitation lets in as many peers as its terms say. Vouches count if they are of full members with enough
        credits that have vouched for few others lately.
        """
        entries = self.register.entries if entries is None else entries
        rule, others = self.entrance, [each for each in entries if each.peer_id != grant.peer_id]
        step = self.outer_step + 1
        if not rule.welcomes:
            return None
        if self._is_revoked(grant):
            return None
        if grant.serial:
            if grant.serial not in self.register.uses and len(self.register.uses) >= MAX_SERIALS:
                return None
            num_uses = self._num_uses(grant.serial, others)
            return Entry(peer_id=grant.peer_id, step=step, serial=grant.serial) if num_uses < grant.max_uses else None
        lately = [each for each in others if each.step > self.outer_step - rule.vouch_steps]
        able = [peer for peer in grant.vouchers if self._may_vouch(peer, lately)]
        if not rule.vouchers or len(able) < rule.vouchers:
            return None
        return Entry(peer_id=grant.peer_id, step=step, vouchers=tuple(able[: rule.vouchers]))

    def _is_revoked(self, grant: Grant) -> bool:
        return grant.serial in self.register.revoked or grant.inviter in self.register.revoked_inviters

    def _num_uses(self, serial: int, entries: Iterable[Entry]) -> int:
        return self.register.uses.get(serial, 0) + sum(each.serial == serial for each in entries)

    def _may_vouch(self, peer: str, lately: Iterable[Entry]) -> bool:
        rule = self.entrance
        is_proven = peer in self.known and not self.left.get(peer, 0)
        has_worked = self.register.credits.get(peer, 0) >= rule.vouch_credits
        return is_proven and has_worked and sum(peer in each.vouchers for each in lately) < rule.vouch_budget

    @property
    def put_out(self) -> frozenset[str]:
        """The peers that entered by an invitation which the author has revoked since."""
        revoked = set(self.register.revoked)
        return frozenset(each.peer_id for each in self.register.entries if each.serial in revoked)

    def is_news(self, revocation: RunRevocation | None) -> bool:
        """Return whether `revocation` has something that the state does not know and has room for."""
        if revocation is None:
            return False
        register = self.register
        is_known = set(revocation.serials).issubset(register.revoked)
        are_known = set(revocation.inviters).issubset(register.revoked_inviters)
        has_room = len(register.revoked) < MAX_ALL_REVOKED
        return (has_room and not is_known) or (len(register.revoked_inviters) < MAX_ALL_REVOKED and not are_known)

    def knows(self, revocation: RunRevocation) -> bool:
        """Return whether the state knows all of `revocation`."""
        known = set(revocation.serials) <= set(self.register.revoked)
        return known and set(revocation.inviters) <= set(self.register.revoked_inviters)

    def to_demote(self, convicted: Collection[str]) -> tuple[str, ...]:
        """Return the peers that a member's report names as demoted: first those whose invitation is revoked, as all
        members know, then the vouchers of peers that evidence has `convicted`."""
        return tuple(dict.fromkeys((*sorted(self.put_out), *self.vouchers_of(convicted))))

    def vouchers_of(self, convicted: Collection[str]) -> tuple[str, ...]:
        """Return the members whose vouches for convicted peers are still in the entries."""
        entries = [each for each in self.register.entries if each.peer_id in convicted]
        return tuple(sorted({peer for each in entries for peer in each.vouchers}))


def credits_after(
    before: Mapping[str, int],
    *,
    most: int,
    proven: Collection[str],
    unproven: Collection[str],
    contributors: Collection[str],
    num_steps: int,
) -> dict[str, int]:
    """Return the credits after a round that made `num_steps` outer steps, 0 or 1.

    `proven` and `unproven` are the trainers after the round, and `contributors` those that contributed. `most` is the
    maximum for each member; 0: the run remembers nobody.
    """
    if not most:
        return {}
    here = {
        peer: min(most, before.get(peer, 0) + (peer in contributors))
        for peer in proven
        if peer in before or peer in contributors
    }
    away = {
        peer: value - num_steps
        for peer, value in before.items()
        if peer not in proven and peer not in unproven and value >= num_steps
    }
    longest = sorted(away, key=lambda peer: (-away[peer], peer))[:MAX_AWAY]
    return here | {peer: away[peer] for peer in longest}


def lets_begin(entrance: Entrance, group: Group) -> bool:
    """Return whether a run with this `entrance` may begin with `group`. A run's first state has no members, so each one
    needs an invitation if the run requires it."""
    if not entrance.required:
        return True
    founding, grants = TrainerStandings(entrance=entrance), grants_in(group.credentials)
    newcomers = [peer for member in group.members for peer in (member.peer_id, *member.newcomers)]
    return not any(founding.refuses(each, grants.get(each)) for each in newcomers) and not founding.overused(grants)


def grants_in(credentials: Iterable[RunCredential]) -> dict[str, Grant]:
    """Return the grants in `credentials`, by peer. Malformed ones are skipped; those of signed groups were checked."""
    grants: dict[str, Grant] = {}
    for each in credentials:
        try:
            grants[each.peer_id] = grant_of(each)
        except ValueError:
            continue
    return grants
