"""For whom a member waits once its interval has ended: what its owner sees while nothing else happens. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.training.round.group_formation import present_members
from swarm.training.round.round_state import RoundState


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """For `peers`, as far as this member knows, since its interval ended `seconds` ago. Without `peers` it computes
    with the others."""

    peers: tuple[str, ...]
    seconds: float


def awaited(state: RoundState) -> tuple[str, ...]:
    """Those without whom the round does not go on: the coordinator, the absent members that it waits for itself, or
    those who have not voted."""
    terms, group = state.terms, state.signed
    match state.phase:
        case "voting" if group is not None:
            return tuple(peer for peer in group.group.peer_ids if peer not in state.votes and peer != terms.me)
        case "forming" | "left_out" | "resting" if state.leader == terms.me:
            return tuple(sorted(set(terms.roster) - present_members(state).keys() - {terms.me}))
        case "forming" | "left_out" | "resting":
            return (state.leader,)
        case _:
            return ()
