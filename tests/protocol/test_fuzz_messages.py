"""A short run of the fuzzer over all decoders and parsers; `python -m protocol.fuzz_messages` makes the long ones."""

from __future__ import annotations

import random

import pytest
from protocol.fuzz_messages import targets
from support.fuzzing import Target, mutated, run


def test_broken_messages_raise_only_typed_errors_and_leave_memory_as_it_was() -> None:
    everything = targets()
    counts = run(everything, 20_000, 7, lambda _line: None)
    assert sum(counts[f"{each.name} {end}"] for each in everything for end in ("accepted", "refused")) == 20_000
    for target in everything:
        if target.name == "mDNS packet":  # text that is broken there has no meaning, and is no error
            continue
        assert counts[f"{target.name} refused"] > 0, f"no message of {target.name} was broken enough"


def test_fuzzer_finds_an_error_that_is_not_typed_and_memory_that_grows() -> None:
    held: list[bytes] = []

    def fails(data: bytes) -> None:
        if data[:1] != b"a":
            raise KeyError("planted")

    for take, found in ((fails, "planted"), (lambda _data: held.append(bytes(range(256)) * 256), "has grown")):
        planted = [Target(name="planted", take=take, examples=(b"abc",))]
        with pytest.raises(AssertionError, match=found):
            run(planted, 2_000, 1, lambda _line: None)


def test_mutated_is_another_message_most_of_the_time() -> None:
    chance = random.Random(1)
    assert sum(mutated(b"some message", chance) != b"some message" for _ in range(100)) > 90
