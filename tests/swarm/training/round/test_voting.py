"""Which peers a vote that differs convicts: pure."""

from __future__ import annotations

from swarm.training.round.voting import disagreement
from swarm_protocol.training_messages import Outcome, Vote

MEMBERS = ("a", "b", "c", "d")


def vote(state: bytes = b"s", parts: tuple[bytes, ...] = ()) -> Vote:
    outcome = Outcome(origin_digest=bytes(32), part_digests=tuple(part * 32 for part in parts), state_digest=state * 32)
    return Vote(run="run", step=1, attempt=0, group_digest=bytes(32), outcome=outcome, kind="commit")


PARTS = (b"1", b"2", b"3", b"4")
MINE = vote(parts=PARTS).outcome


def test_disagreement_of_more_than_a_third_over_a_part_convicts_its_owner_alone() -> None:
    other = vote(b"x", parts=(b"1", b"9", b"3", b"4"))
    assert disagreement(MINE, {"c": other, "d": other}, MEMBERS, MEMBERS) == (("b",), ())


def test_disagreement_of_members_that_do_not_decide_convicts_nobody() -> None:
    other = vote(b"x", parts=(b"1", b"9", b"3", b"4"))
    assert disagreement(MINE, {"c": other, "d": other}, MEMBERS, ("a", "b")) == ((), ("c", "d"))


def test_disagreement_of_one_over_parts_of_others_convicts_nobody() -> None:
    votes = {"b": vote(parts=PARTS), "d": vote(b"x", parts=(b"9",) * 4)}
    assert disagreement(MINE, votes, MEMBERS, MEMBERS) == ((), ("d",))


def test_disagreement_over_the_state_alone_convicts_the_fewer() -> None:
    other, mine = vote(b"x", parts=PARTS), vote(parts=PARTS)
    assert disagreement(MINE, {"a": mine, "b": mine, "c": other}, MEMBERS, MEMBERS) == (("c",), ())
    assert disagreement(MINE, {"a": mine, "b": other, "c": other}, MEMBERS, MEMBERS) == ((), ())


def test_disagreement_of_as_many_over_the_state_alone_convicts_nobody() -> None:
    assert disagreement(MINE, {"a": vote(parts=PARTS), "c": vote(b"x", parts=PARTS)}, MEMBERS, MEMBERS) == ((), ())
