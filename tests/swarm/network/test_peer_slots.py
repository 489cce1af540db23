"""Slots are bounded for each peer and in all, and a flood does not keep modest peers out.

`test_conformance` has the bounds of calls and streams.
"""

from __future__ import annotations

from swarm.network.peer_budgets import NUM_GUARANTEED, PeerSlots


def test_slots_are_bounded_for_each_peer_and_in_all() -> None:
    slots = PeerSlots[str](per_peer=lambda: 8, in_all=20)
    for peer in ("a", "b", "c", "d"):
        while slots.has_room(peer):
            slots.take(peer)
    assert [slots.held_by(peer) for peer in ("a", "b", "c", "d")] == [8, 8, NUM_GUARANTEED, NUM_GUARANTEED]
    assert slots.num_held == 20 + NUM_GUARANTEED
    for _ in range(NUM_GUARANTEED):
        slots.give_back("d")
    assert not slots.has_room("a")
    assert slots.has_room("d"), "a peer that holds little must be let in"
    with slots.taken("a") as has_room:
        assert not has_room
    assert slots.held_by("a") == 8
