"""Tests the message about a run that waits for members: how many are present, how many it needs, and what lets it
continue."""

from __future__ import annotations

from typing import Any

import pytest
from swarm.training.outside.observer import shortage_of
from swarm.training.run.run_config import RunConfig
from swarm_protocol import limits
from swarm_protocol.records import TrainerRecord


def rule(**settings: Any) -> RunConfig:
    return RunConfig(**{"name": "x", "majority_after_s": 0, **settings})


def members(**states: str) -> dict[str, TrainerRecord]:
    return {
        peer: TrainerRecord(run="x-0123456789ab", outer_step=1, digest=bytes(32), state=state)  # type: ignore[arg-type]
        for peer, state in states.items()
    }


@pytest.mark.parametrize(
    ("run", "roster", "present", "words"),
    [
        (rule(min_group=2), "", {"a": "training"}, "1 of the 2 members that a step needs is there"),
        (
            rule(min_group=3),
            "",
            {"a": "training", "b": "training", "c": "joining"},
            "2 of the 3 members that a step needs are there, 1 joining",
        ),
        (rule(min_group=1), "abc", {"a": "training"}, None),
        (rule(min_group=2), "abc", {"a": "training", "b": "training"}, None),
        (
            rule(min_group=2),
            "abcd",
            {"a": "training", "b": "training", "new": "training"},
            "2 of the 3 members of the last step that the next one needs are there; missing: C, D",
        ),
        (rule(min_group=2, majority_after_s=60), "abcd", {"a": "training", "b": "training"}, None),
        (
            rule(min_group=2, majority_after_s=60),
            "abcd",
            {"c": "training", "d": "training"},
            "2 of the 3 members of the last step that the next one needs are there; missing: A, B",
        ),
        (
            rule(min_group=2, majority_after_s=60),
            "abcd",
            {"a": "training"},
            "1 of the 2 members of the last step that the next one needs is there; missing: B, C, D",
        ),
        (rule(min_group=2), "ab", {"a": "finished", "b": "training"}, None),
    ],
)
def test_shortage_counts_present_and_needed_members(
    run: RunConfig, roster: str, present: dict[str, str], words: str | None
) -> None:
    found = shortage_of(run, 1, tuple(roster), members(**present))
    assert (found and found.words(str.upper)) == words


def test_shortage_names_the_authors_order_only_when_no_newcomer_helps() -> None:
    run = rule(min_group=2, majority_after_s=60)
    newcomer_helps = shortage_of(run, 1, ("a", "b"), members(a="training"))
    assert newcomer_helps is not None
    assert not newcomer_helps.is_of_roster
    assert "swarm-node join --run" in newcomer_helps.remedy
    newcomer_comes = shortage_of(run, 1, ("a", "b"), members(a="training", new="joining"))
    assert newcomer_comes is not None
    assert newcomer_comes.remedy == ""
    none_helps = shortage_of(run, 1, ("a", "b"), members(b="training", new="training"))
    assert none_helps is not None
    assert none_helps.missing == ("a",)
    assert "swarm-node run resume" in none_helps.remedy


def test_shortage_of_seats_names_the_order_for_newcomers_and_not_another_node() -> None:
    run = rule(min_group=4)
    here = members(a="training", b="training", new="training", other="training")
    found = shortage_of(run, 1, ("a", "b", "c"), here)
    assert found is not None
    words = "newcomers on probation have too few seats beside proven members: 2 of the 3 that a step needs are there"
    assert found.words(str.upper) == f"{words}; missing: C"
    assert "swarm-node run resume FILE --peers ADDR --members LIST" in found.remedy
    assert shortage_of(run, 1, ("a", "b", "c"), here | members(c="training")) is None
    assert shortage_of(run, 0, ("a", "b", "c"), here) is None, "founders have no probation"


def test_shortage_names_the_first_missing_members_and_counts_the_others() -> None:
    roster = tuple(f"m{index:03}" for index in range(limits.MAX_GROUP_MEMBERS))
    found = shortage_of(rule(min_group=2), 1, roster, members(m000="training"))
    assert found is not None
    assert len(found.missing) == limits.MAX_GROUP_MEMBERS - 1
    assert found.words(str).endswith("; missing: m001, m002, m003, m004, m005, m006, m007, m008 and 247 more")
