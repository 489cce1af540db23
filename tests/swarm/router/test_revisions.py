from __future__ import annotations

from collections.abc import Collection

import pytest
from support.work_count import num_lines
from swarm.router.revisions import Revision, choose, describe_revisions, revisions, split_pin
from swarm_protocol.errors import ConfigError
from swarm_protocol.records import ServeRecord

OLD, NEW, OTHER = "a" * 32, "b" * 32, "ab" * 16


def serve_record(start: int, end: int, revision: str) -> ServeRecord:
    return ServeRecord(
        model="m",
        revision=revision,
        num_blocks=8,
        start=start,
        end=end,
        state="serving",
        prefill_ms_per_token=1.0,
        decode_ms_per_block=1.0,
        free_kv_tokens=1000,
    )


def found(*servers: tuple[str, int, int, str], failing: Collection[str] = ()) -> list[Revision]:
    """Return records of a model of 8 blocks, from tuples of peer, start, end and digest."""
    return revisions({peer: serve_record(start, end, revision=digest) for peer, start, end, digest in servers}, failing)


def chosen(revision: Revision | None) -> str | None:
    return revision.digest if revision else None


def test_revisions_prefer_a_whole_one_to_one_of_more_servers() -> None:
    listed = found(*((f"old{i}", 0, 4, OLD) for i in range(5)), ("new", 0, 8, NEW))
    assert [(each.digest, each.num_servers, each.missing()) for each in listed] == [(NEW, 1, ()), (OLD, 5, ((4, 8),))]
    assert chosen(choose(listed)) == NEW
    assert choose(found()) is None


def test_revisions_prefer_a_whole_one_when_the_servers_of_another_fail() -> None:
    servers = (("a", 0, 8, OLD), ("b", 0, 8, OLD), ("c", 0, 8, NEW))
    assert chosen(choose(found(*servers))) == OLD
    dead = {"a", "b"}
    assert chosen(choose(found(*servers, failing=dead), failing=dead)) == NEW


def test_choose_prefers_the_used_revision_to_one_with_more_servers_or_a_greater_digest() -> None:
    servers = (("a", 0, 8, OLD), ("b", 0, 8, NEW), ("c", 0, 8, NEW))
    assert chosen(choose(found(*servers))) == NEW
    assert chosen(choose(found(*servers), used=[OLD])) == OLD
    assert chosen(choose(found(*servers), used=[OTHER, OLD, NEW])) == OLD


def test_choose_leaves_the_used_revision_when_it_is_lost_and_not_when_it_fails_once() -> None:
    servers = (("a", 0, 8, OLD), ("b", 0, 8, NEW))
    assert chosen(choose(found(*servers), used=[OLD], failing={"a"})) == OLD
    assert chosen(choose(found(*servers), used=[OLD], failing={"a"}, lost={"a"})) == NEW
    assert chosen(choose(found(("a", 0, 4, OLD), ("b", 0, 8, NEW)), used=[OLD])) == NEW


def test_choose_returns_the_used_revision_when_all_have_gaps() -> None:
    assert chosen(choose(found(("a", 0, 2, OLD), ("b", 0, 7, NEW)), used=[OLD])) == OLD


def test_choose_returns_the_pinned_revision_or_none() -> None:
    listed = found(("a", 0, 8, OLD), ("b", 0, 4, NEW), ("c", 0, 8, OTHER))
    assert chosen(choose(listed, pin=NEW[:8], used=[OLD])) == NEW
    assert choose(listed, pin="c" * 8, used=[OLD]) is None
    twins = found(("a", 0, 8, OLD), ("b", 0, 8, OLD[:8] + NEW[8:]))
    with pytest.raises(ConfigError, match="2 revisions begin with aaaaaaaa"):
        choose(twins, pin=OLD[:8])
    assert chosen(choose(twins, pin=OLD[:9])) == OLD


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tiny", ("tiny", "")),
        ("tiny@1a2b3c4d", ("tiny", "1a2b3c4d")),
        ("org/tiny@x@" + OLD, ("org/tiny@x", OLD)),
        ("tiny@1a2b3c4", ("tiny@1a2b3c4", "")),
        ("tiny@main-branch", ("tiny@main-branch", "")),
        ("tiny@" + "a" * 65, ("tiny@" + "a" * 65, "")),
        ("@1a2b3c4d", ("@1a2b3c4d", "")),
    ],
)
def test_split_pin_separates_the_model_and_its_revision(text: str, expected: tuple[str, str]) -> None:
    assert split_pin(text) == expected


def test_in_words_names_a_few_revisions_with_their_servers() -> None:
    assert describe_revisions(found(("a", 0, 8, OLD), ("b", 0, 8, NEW), ("c", 0, 8, NEW))) == (
        "bbbbbbbbbbbb by 2 servers, aaaaaaaaaaaa by 1 server"
    )
    many = found(*((f"p{i}", 0, 8, f"{i}" * 32) for i in range(6)))
    assert describe_revisions(many).endswith(" and 2 more")


def test_choose_among_thousands_of_made_up_revisions_takes_little_work_for_each() -> None:
    """A gateway chooses several times for each request, and among every model's revisions for its /health."""
    num = 1000
    servers = {f"peer {index}": serve_record(4, 8, revision=f"{index:032x}") for index in range(num)}
    assert num_lines(lambda: choose(revisions(servers, {"peer 0"}), failing={"peer 0"})) < 100 * num
