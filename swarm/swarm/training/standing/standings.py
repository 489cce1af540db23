"""Standings say after a committed state whether each peer counts fully, and what the next state remembers of it.

It follows from the state, the run's rules and the credentials in a signed group alone, so that every replica computes
the same. Pure functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from swarm_protocol.run_credentials import Grant, RunCredential, RunRevocation, grant_of
from swarm_protocol.training_messages import Group

from swarm.training.standing.entrance import MAX_ALL_REVOKED, MAX_ENTRIES, MAX_SERIALS, Entrance, Entry, Probation
from swarm.training.standing.register import Register, credits_after

Grants = Mapping[str, Grant]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStandings:
    """Says where peers stand after `outer_step` steps. Of the `known` ones, the trainers of the state, those in
    `left` are on probation, for that many more steps. Those with `credits` are remembered (see `register`), and count
    fully. Any other peer would begin now, at once where the `entrance` honours its grant. `entries` are of those that
    entered so, and `uses` count those of each serial that are no more among them. The author has taken back the
    invitations with the serials in `revoked`, and the right of the `revoked_inviters`."""

    rule: Probation = field(default_factory=Probation)
    entrance: Entrance = field(default_factory=Entrance)
    left: Mapping[str, int] = field(default_factory=dict)
    known: Collection[str] = ()
    outer_step: int = 0
    credits: Mapping[str, int] = field(default_factory=dict)
    entries: tuple[Entry, ...] = ()
    uses: Mapping[int, int] = field(default_factory=dict)
    revoked: tuple[int, ...] = ()
    revoked_inviters: tuple[str, ...] = ()

    def is_new(self, peer: str) -> bool:
        """Return whether the state says nothing of `peer`."""
        return peer not in self.known and peer not in self.credits

    def steps_left(self, peer: str, grant: Grant | None = None) -> int:
        """Return the steps to which `peer` has to contribute before it counts fully; 0: it does. `grant` is what the
        credential says that it shows."""
        if not self.is_new(peer):
            return self.left.get(peer, 0)
        newcomer = self.rule.of_newcomer(self.outer_step)
        return min(newcomer, self.entrance.steps) if grant is not None and self._entry(grant) else newcomer

    def refuses(self, peer: str, grant: Grant | None = None) -> bool:
        """Return whether `peer` may not enter the run, which wants a credential that it does not show."""
        if not self.entrance.required or peer in self.entrance.listed:
            return False
        if not self.is_new(peer):
            return peer in self.put_out
        return grant is None or self._entry(grant) is None

    def why_shut_out(self, grant: Grant) -> str:
        """Return why the invitation of `grant` lets its peer in no more, which has not entered and does not count fully
        yet; empty if it may, or the peer needs none."""
        peer, has_entered = grant.peer_id, any(each.peer_id == grant.peer_id for each in self.entries)
        needs_it = self.steps_left(peer, grant) > 0 or self.refuses(peer, grant)
        if not (self.entrance.welcomes and grant.serial and needs_it) or has_entered:
            return ""
        if self._is_revoked(grant):
            return "was revoked by the run's author"
        num_uses = self._num_uses(grant.serial, self.entries)
        return f"is used up ({num_uses} of {grant.max_uses})" if num_uses >= grant.max_uses else ""

    def overused(self, grants: Grants) -> list[str]:
        """Return whose grants do not hold together with those of the others, as uses or vouchers are used up: of peers
        that enter with one invitation, the first ones in the order of peer ids go first."""
        standings, surplus = self, []
        for peer in sorted(grants):
            if not self.is_new(peer) or self._entry(grants[peer]) is None:
                continue
            if (entry := standings._entry(grants[peer])) is None:
                surplus.append(peer)
            else:
                standings = replace(standings, entries=(*standings.entries, entry))
        return surplus

    def honoured(self, grants: Grants) -> dict[str, Grant]:
        """Return the grants of a group that let their peers in, beside each other."""
        surplus = set(self.overused(grants))
        return {peer: each for peer, each in grants.items() if peer not in surplus}

    def without_refused(self, trainers: Sequence[str], grants: Grants) -> tuple[str, ...]:
        """Return `trainers` without those that the run does not let in with the `grants` that are honoured."""
        return tuple(peer for peer in trainers if not self.refuses(peer, grants.get(peer)))

    def after(
        self,
        trainers: Collection[str],
        contributors: Collection[str],
        *,
        grants: Grants | None = None,
        demoted: Collection[str] = (),
    ) -> tuple[tuple[str, int], ...]:
        """Return who of `trainers` is on probation after a step to which `contributors` have contributed, with the
        steps left, in the order of peer ids. Those in `demoted` begin anew."""
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
        """Return the register after a round of `num_steps` outer steps, 0 or 1, behind which there are `trainers`."""
        unproven = {peer for peer, _ in self.after(trainers, contributors, grants=grants, demoted=demoted)}
        is_kept = self.rule.steps or self.entrance.required or self.entrance.vouchers
        out = self.put_out
        credit = credits_after(
            {peer: value for peer, value in self.credits.items() if peer not in demoted and peer not in out},
            most=self.rule.absence_steps if is_kept else 0,
            proven=set(trainers) - unproven - set(demoted) - out,
            unproven=unproven,
            contributors=contributors,
            num_steps=num_steps,
        )
        serials, inviters = (revocation.serials, revocation.inviters) if revocation else ((), ())
        entries = self._entries_after(trainers, grants or {}, demoted)
        uses = Counter(self.uses)
        uses.update(each.serial for each in entries[:-MAX_ENTRIES] if each.serial)
        return Register(
            credits=credit,
            entries=entries[-MAX_ENTRIES:],
            uses=tuple(sorted(uses.items())),
            revoked=tuple(dict.fromkeys((*self.revoked, *serials)))[:MAX_ALL_REVOKED],
            revoked_inviters=tuple(dict.fromkeys((*self.revoked_inviters, *inviters)))[:MAX_ALL_REVOKED],
        )

    def _entries_after(self, trainers: Collection[str], grants: Grants, demoted: Collection[str]) -> tuple[Entry, ...]:
        entered = {peer: self._entry(grants[peer]) for peer in sorted(grants) if peer in trainers and self.is_new(peer)}
        entries = [each for each in self.entries if each.peer_id not in entered]
        entries += [entry for entry in entered.values() if entry is not None]
        without = (
            replace(each, vouchers=tuple(peer for peer in each.vouchers if peer not in demoted)) for each in entries
        )
        out = self.put_out & set(demoted)
        return tuple(each for each in without if (each.serial or each.vouchers) and each.peer_id not in out)

    def _entry(self, grant: Grant) -> Entry | None:
        """Return how the peer of `grant` would enter with it; None if the state does not honour it.

        An invitation lets in as many peers as its terms say. Vouches count of members of full standing with enough
        credits, that have vouched for few others lately.
        """
        rule, others = self.entrance, [each for each in self.entries if each.peer_id != grant.peer_id]
        step = self.outer_step + 1
        if not rule.welcomes:
            return None
        if self._is_revoked(grant):
            return None
        if grant.serial:
            if grant.serial not in self.uses and len(self.uses) >= MAX_SERIALS:
                return None
            num_uses = self._num_uses(grant.serial, others)
            return Entry(peer_id=grant.peer_id, step=step, serial=grant.serial) if num_uses < grant.max_uses else None
        lately = [each for each in others if each.step > self.outer_step - rule.vouch_steps]
        able = [peer for peer in grant.vouchers if self._may_vouch(peer, lately)]
        if not rule.vouchers or len(able) < rule.vouchers:
            return None
        return Entry(peer_id=grant.peer_id, step=step, vouchers=tuple(able[: rule.vouchers]))

    def _is_revoked(self, grant: Grant) -> bool:
        return grant.serial in self.revoked or grant.inviter in self.revoked_inviters

    def _num_uses(self, serial: int, entries: Iterable[Entry]) -> int:
        return self.uses.get(serial, 0) + sum(each.serial == serial for each in entries)

    def _may_vouch(self, peer: str, lately: Iterable[Entry]) -> bool:
        rule = self.entrance
        is_proven = peer in self.known and not self.left.get(peer, 0)
        has_worked = self.credits.get(peer, 0) >= rule.vouch_credits
        return is_proven and has_worked and sum(peer in each.vouchers for each in lately) < rule.vouch_budget

    @property
    def put_out(self) -> frozenset[str]:
        """The peers that entered by an invitation which the author has revoked since."""
        revoked = set(self.revoked)
        return frozenset(each.peer_id for each in self.entries if each.serial in revoked)

    def is_news(self, revocation: RunRevocation | None) -> bool:
        """Return whether the state does not know all of `revocation`, and has room for more."""
        if revocation is None:
            return False
        has_room = len(self.revoked) < MAX_ALL_REVOKED and not set(revocation.serials) <= set(self.revoked)
        has_inviters = len(self.revoked_inviters) < MAX_ALL_REVOKED
        return has_room or (has_inviters and not set(revocation.inviters) <= set(self.revoked_inviters))

    def knows(self, revocation: RunRevocation) -> bool:
        """Return whether the state knows all of `revocation`."""
        known = set(revocation.serials) <= set(self.revoked)
        return known and set(revocation.inviters) <= set(self.revoked_inviters)

    def to_demote(self, convicted: Collection[str]) -> tuple[str, ...]:
        """Return whom a member's report names: those whose invitation is revoked, which all members know, and then the
        vouchers of peers that evidence has `convicted`."""
        return tuple(dict.fromkeys((*sorted(self.put_out), *self.vouchers_of(convicted))))

    def vouchers_of(self, convicted: Collection[str]) -> tuple[str, ...]:
        """Return the members that vouched for peers that evidence has convicted, and still stand for it."""
        return tuple(sorted({peer for each in self.entries if each.peer_id in convicted for peer in each.vouchers}))


def lets_begin(entrance: Entrance, group: Group) -> bool:
    """Return whether a run with this `entrance` may begin with `group`. Everybody knows that a run's first state has no
    members, so each one has to be invited where the run requires that."""
    if not entrance.required:
        return True
    founding, grants = TrainerStandings(entrance=entrance), grants_in(group.credentials)
    newcomers = [peer for member in group.members for peer in (member.peer_id, *member.newcomers)]
    return not any(founding.refuses(each, grants.get(each)) for each in newcomers) and not founding.overused(grants)


def grants_in(credentials: Iterable[RunCredential]) -> dict[str, Grant]:
    """Return what `credentials` say, by peer. Malformed ones say nothing: those of signed groups were checked."""
    grants: dict[str, Grant] = {}
    for each in credentials:
        try:
            grants[each.peer_id] = grant_of(each)
        except ValueError:
            continue
    return grants
