"""What a session is to do next, as values that `course` returns and `session` carries out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from swarm_protocol.errors import SwarmError

from swarm.serving.session.hop import Hop


class Cause(Enum):
    """How a server was lost: it went silent, it said so itself, or the client saw it break the protocol."""

    GONE = "gone"
    TOLD = "told"
    JUDGED = "judged"


@dataclass(slots=True, eq=False, kw_only=True)
class Repair:
    """Blocks `[start, end)` that nobody runs, or that a leaving server (`old`) runs until others have taken over.

    It goes on since `begun_s`, and has held up the answer since `since_s`. Whoever had the blocks last was `lost_peer`,
    which had run `lost_done` positions; nobody before the first opening.

    `fresh` are the hops that are being opened. `is_handing`: they take over what `old` has of keys and values by then,
    which goes on until they are ready.
    """

    start: int
    end: int
    since_s: float = 0.0
    begun_s: float = 0.0
    lost_peer: str = ""
    lost_done: int = 0
    error: SwarmError | None = None
    old: Hop | None = None
    fresh: list[Hop] = field(default_factory=list)
    is_handing: bool = False
    is_opening: bool = False
    may_hand: bool = True
    is_asleep: bool = True
    has_looked_patiently: bool = False
    open_by_s: float = 0.0

    @property
    def has_patience(self) -> bool:
        """Nothing goes on without a replacement; a leaving server still answers, and the first opening fails early."""
        return self.old is None and self.lost_peer != ""


@dataclass(frozen=True, slots=True)
class Find:
    """Look for servers, and tell the course by `found` or `not_found`."""

    repair: Repair


@dataclass(frozen=True, slots=True)
class OpenSeat:
    """Ask the hop's server for a seat there, which takes over that of `taken_over` if there is one."""

    hop: Hop
    taken_over: Hop | None


@dataclass(frozen=True, slots=True)
class Hand:
    """Tell a server that `to_peer_id` may take the seat's keys and values."""

    hop: Hop
    to_peer_id: str


@dataclass(frozen=True, slots=True)
class Feed:
    """Send rows `[start, end)` of the hop's inputs. `forward`: their outputs are needed further down.

    Where a token is wanted it is the one after `num_drawn` others of this question, and `ahead` more may follow it
    without being asked for.
    """

    hop: Hop
    start: int
    end: int
    want: str
    forward: bool
    num_drawn: int = 0
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Relink:
    """Tell the server its neighbours, as `hop.told` has them. It answers how much it had been given before."""

    hop: Hop


@dataclass(frozen=True, slots=True)
class CloseSeat:
    hop: Hop


@dataclass(frozen=True, slots=True)
class Blame:
    """Avoid the peer for a while."""

    peer_id: str
    error: SwarmError
    cause: Cause


@dataclass(frozen=True, slots=True)
class Repaired:
    """Others have taken a lost or leaving server's blocks over; they run `num_tokens` positions again."""

    repair: Repair
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The output that came last answers the question from its row `skip` on. `is_last`: that completes it.

    `goes_on`: it is a token and the next input, too: tell the course at once, by `follow`.
    """

    skip: int
    is_last: bool
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """The session cannot go on."""

    error: SwarmError


Action: TypeAlias = Find | OpenSeat | Hand | Feed | Relink | CloseSeat | Blame | Repaired | Answer | Fail
