"""A run's rules for newcomers: which of them enter by a credential, and how much others count until they have proven
themselves.

An invitation counts until it has let in as many peers as its terms say. Vouches count if enough members signed. Each
must be a full member that has contributed to as many outer steps as a stranger's probation takes, and has vouched for
no more newcomers lately than the run allows. So a newcomer cannot vouch before it has worked as much itself, and keys
that vouch for each other gain nothing. If a peer is convicted, the probation of its vouchers starts again. The state
keeps an `Entry` of each peer that entered by a credential.

In an open run keys cost nothing. So a peer that joins a running run is on probation for a number of outer steps to
which it must contribute, that is, report samples (only a `validation_rate`, off by default, checks that it trained on
them). Until then its work counts for less, all peers on probation have a bounded share of a step's weight and seats,
and none of them decides: votes, rosters and certificates are those of proven members. So many new keys take as long as
honest newcomers to get a vote, a few at a time, and must do as much work if intervals are validated. A newcomer at
outer step n needs no more than n steps, since nobody has proven more. So the first members of a run are its founders
and count fully at once, and a young run has short probations.

`TrainerStandings` applies the rules. Values only; the weights are whole numbers, equal on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from swarm_protocol import limits
from swarm_protocol.checks import check_int
from swarm_protocol.identity import check_peer_id, short_id
from swarm_protocol.training_messages import Contribution

PER_MILLE = 1000
MAX_ENTRIES = 512
"""Maximum entries that a state keeps, at most 190 KiB; the oldest are dropped. Their peers keep their standing. Their
vouchers are forgotten, but the uses of their invitations still count."""

MAX_SERIALS = 2048
"""Invitations whose uses a state counts in addition to the entries, 50 KiB. Beyond that it honours no new
invitation."""

MAX_ALL_REVOKED = 2048
"""Maximum revoked serials, and revoked keys, that a state keeps: at most 40 and 110 KiB. It forgets none, and ignores
further ones: an old revocation that was displaced could be shown again to displace others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance:
    """A run's rule for credentials. `welcomes`: invitations and vouches count. `required`: only peers with one and the
    `listed` peers enter.

    A peer that enters by a credential has `steps` of probation. It needs the vouches of `vouchers` members (0: vouches
    do not count). A member may vouch for `vouch_budget` newcomers within `vouch_steps` outer steps, once it has
    `vouch_credits` (see `standings`).
    """

    welcomes: bool = False
    required: bool = False
    listed: tuple[str, ...] = ()
    steps: int = 0
    vouchers: int = 0
    vouch_budget: int = 0
    vouch_steps: int = 0
    vouch_credits: int = 1

    @property
    def who_may_join(self) -> str:
        """Return in words who may contribute."""
        peers = "1 peer" if len(self.listed) == 1 else f"{len(self.listed)} peers"
        if self.required:
            return f"{f'{peers} and ' if self.listed else ''}those with an invitation may join"
        return f"{peers} may join" if self.listed else "anyone may join"

    def who_is_welcome(self, num_inviters: int) -> str:
        """Return in words the effect of vouches and of invitations by the author and `num_inviters` others; empty if
        none."""
        if not self.welcomes:
            return ""
        by = "the author" + (f" or {num_inviters} more" if num_inviters else "")
        members = ""
        if self.vouchers:
            vouching = "1 member that vouches" if self.vouchers == 1 else f"{self.vouchers} members that vouch"
            members = f", or {vouching} for it,"
        steps = f"after {self.steps} outer step{'' if self.steps == 1 else 's'}" if self.steps else "at once"
        return f"a node with an invitation from {by}{members} counts fully {steps}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """`peer_id` entered at outer step `step`: with the invitation `serial`, or by the vouches of `vouchers`."""

    peer_id: str
    step: int
    serial: int = 0
    vouchers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError."""
        for peer in (self.peer_id, *self.vouchers):
            check_peer_id(peer)
        check_int(self.step, "step", high=limits.MAX_OUTER_STEP)
        check_int(self.serial, "serial", high=2**64 - 1)
        if list(self.vouchers) != sorted(set(self.vouchers)) or len(self.vouchers) > limits.MAX_VOUCHERS:
            raise ValueError("an entry's vouchers are not few, sorted and distinct")

    @property
    def how(self) -> str:
        """Return in words how the peer entered."""
        if self.serial:
            return f"invited, serial {self.serial:016x}"
        return f"vouched for by {', '.join(short_id(peer) for peer in self.vouchers)}"

    def to_json(self) -> list[Any]:
        return [self.peer_id, self.step, f"{self.serial:016x}", self.vouchers]

    @classmethod
    def from_json(cls, values: list[Any]) -> Entry:
        """Raises ValueError, TypeError or LookupError."""
        peer_id, step, serial, vouchers = values
        return cls(peer_id=peer_id, step=step, serial=int(serial, 16), vouchers=tuple(vouchers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Probation:
    """A run's rule for newcomers, which are on probation until they have contributed to `steps` outer steps (0: nobody
    is). Members on probation together have at most `share` of a step's weight, and of a round's seats. A proven member
    that is away is remembered for as many steps as it has contributed to, at most `absence_steps`."""

    steps: int = 0
    share: float = 0.25
    absence_steps: int = 0

    def of_newcomer(self, outer_step: int) -> int:
        """Return the steps of probation of a peer that joins at `outer_step`."""
        return min(self.steps, outer_step)

    def num_seats(self, max_group: int, num_proven: int) -> int:
        """Return how many members on probation may be in a group with `num_proven` others: at most half as many, so
        that at most a third of the members that an aggregator counts are strangers, but always one. Without probation,
        any number."""
        if not self.steps:
            return max_group
        return max(1, min(int(self.share * max_group), num_proven // 2))

    def num_proven_needed(self, min_group: int, max_group: int, outer_step: int) -> int:
        """Return how many proven members a group of `min_group` needs after `outer_step`, as newcomers have seats for
        the others."""
        if not self.of_newcomer(outer_step):
            return 0
        return next(num for num in range(min_group) if num + self.num_seats(max_group, num) >= min_group)

    def weights(self, members: Sequence[Contribution]) -> list[int]:
        """Return the weight of each of `members`. That of a proven member without followers is its tokens.

        Tokens of a member on probation count in proportion to the steps that it has done, this one included. If the
        tokens of all members on probation exceed `share` of the total, they are scaled down together. The same limit
        holds within the cluster of each head. A contributor has at least a weight of one token.
        """
        if not self.steps:
            return [member.num_tokens for member in members]
        proven, fresh = zip(*map(self._cluster, members), strict=True) if members else ((), ())
        cap, total = self._cap(sum(proven)), sum(fresh)
        if sum(proven) and total > cap:
            fresh = tuple(tokens * cap // total for tokens in fresh)
        least = [int(member.num_tokens > 0) for member in members]
        return [max(each) for each in zip(least, map(sum, zip(proven, fresh, strict=True)), strict=True)]

    def _cluster(self, member: Contribution) -> tuple[int, int]:
        """Return the tokens of a member and its followers: those of proven trainers, and the weighted ones of those on
        probation."""
        works = [(member.steps_left, member.own_tokens)]
        works += [(each.steps_left, each.num_tokens) for each in member.followers]
        proven = sum(tokens for left, tokens in works if not left)
        fresh = sum(tokens * max(1, self.steps + 1 - left) // (self.steps + 1) for left, tokens in works if left)
        return proven, min(fresh, self._cap(proven)) if member.followers else fresh

    def _cap(self, proven: int) -> int:
        """Return the maximum tokens on probation beside `proven` ones."""
        share = round(self.share * PER_MILLE)
        return proven * share // (PER_MILLE - share)
