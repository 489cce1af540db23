"""What was made of a record is kept while the record is the same, and no longer."""

from __future__ import annotations

from swarm_node.dashboard.memo import Made


def test_made_again_only_for_another_record() -> None:
    asked: list[str] = []

    def make(peer_id: str, record: list[int]) -> int:
        asked.append(peer_id)
        return sum(record)

    made, ann, bob = Made(make), [1], [2]
    assert made.of({"ann": ann, "bob": bob}) == {"ann": 1, "bob": 2}
    assert made.of({"ann": ann, "bob": [2, 3]}) == {"ann": 1, "bob": 5}
    assert asked == ["ann", "bob", "bob"]
    assert made.of({}) == {}
    assert made.of({"ann": ann}) == {"ann": 1}
    assert asked == ["ann", "bob", "bob", "ann"], "who was away is not kept"
