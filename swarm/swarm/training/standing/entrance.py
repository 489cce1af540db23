"""This rule says who enters a run at once, by invitations and vouches, and what its state keeps of those who did.

An invitation counts until it has let in as many peers as its terms say. Vouches count if enough members signed: each of
full standing, which has contributed to as many outer steps as a stranger would have to prove, and that has vouched for
no more newcomers lately than the run allows. So one that was vouched for vouches for nobody before it has worked as
much itself, and keys that vouch for each other gain nothing. A member that vouched for a peer that is convicted later
begins its own probation again.

The state keeps an `Entry` of each peer that entered so. `TrainerStandings` applies the rule. Values only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swarm_protocol import limits
from swarm_protocol.checks import check_int
from swarm_protocol.identity import check_peer_id

MAX_ENTRIES = 512
"""The newest entries that a state keeps, 190 KiB at most. Who entered before them stays where it is. Its vouchers are
forgotten; of its invitation the use still counts."""

MAX_SERIALS = 2048
"""Invitations of whose uses a state keeps count beside the entries, 50 KiB. Beyond that it honours no further ones."""

MAX_ALL_REVOKED = 2048
"""Revoked serials, and keys, that a state keeps, 40 and 110 KiB at most. It forgets none: what it has no room for is
not revoked, since an old revocation that was displaced could be shown again to displace others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance:
    """A run's rule. `welcomes`: invitations and vouches count. `required`: nobody else enters but the `listed` peers.

    Who enters so has `steps` of probation. Vouches of `vouchers` members are needed (0: none count); a member vouches
    for `vouch_budget` newcomers within `vouch_steps` outer steps, once it has `vouch_credits` (see `register`).
    """

    welcomes: bool = False
    required: bool = False
    listed: tuple[str, ...] = ()
    steps: int = 0
    vouchers: int = 0
    vouch_budget: int = 0
    vouch_steps: int = 0
    vouch_credits: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """`peer_id` entered with outer step `step`: with the invitation of this `serial`, or by these `vouchers`."""

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
        return f"vouched for by {', '.join(peer[-6:] for peer in self.vouchers)}"

    def to_json(self) -> list[Any]:
        return [self.peer_id, self.step, f"{self.serial:016x}", self.vouchers]

    @classmethod
    def from_json(cls, values: list[Any]) -> Entry:
        """Raises ValueError, TypeError or LookupError."""
        peer_id, step, serial, vouchers = values
        return cls(peer_id=peer_id, step=step, serial=int(serial, 16), vouchers=tuple(vouchers))
