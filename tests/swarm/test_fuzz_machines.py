"""A short run of the fuzzer over the pure state machines and the checks of proofs; `python -m protocol.fuzz_messages`
makes the long ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import get_args

import pytest
from support import fuzzed_proofs
from support.fuzzed_rounds import check_bounded, play_round
from support.fuzzed_sessions import play_inbox, play_session
from support.fuzzed_streams import play_stream
from support.fuzzed_tokenizers import FILES_TARGET, REPLY_TARGET, process
from support.fuzzing import Target, run
from support.round_scripts import outcome, ready, setup, signed, vote_of
from swarm.serving.session import session_state
from swarm.training.round import round_events
from swarm.training.round.round_events import Lost, Reported, Sighted
from swarm.training.round.round_state import MAX_HEARD, Phase
from swarm.training.round.state_machine import begin, step


def histories(play: Callable[[bytes], Mapping[str, int]], num_histories: int) -> Counter[str]:
    happened: Counter[str] = Counter()
    for number in range(num_histories):
        happened += Counter(play(number.to_bytes(2, "big")))
    return happened


def names(union: object) -> set[str]:
    return {each.__name__ for each in get_args(union)}


def test_round_goes_on_whatever_members_and_strangers_say() -> None:
    happened = histories(play_round, 160)
    missing = {*names(round_events.Event), *get_args(Phase)} - happened.keys()
    assert not missing, f"the histories do not reach {missing}"


def test_session_goes_on_whatever_its_servers_say() -> None:
    happened = histories(play_session, 480)
    assert not names(session_state.Action) - happened.keys()
    assert happened["violations"] > 500
    assert happened["TakeToken"] > 100


def test_inbox_of_a_server_counts_what_waits_whatever_its_client_sends() -> None:
    happened = histories(play_inbox, 60)
    assert happened["PeerViolation"] > 500
    assert happened["PeerRefused"] > 10


def test_stream_goes_on_whatever_its_other_side_sends() -> None:
    happened = histories(play_stream, 200)
    assert happened["received"] > 200
    assert happened["sent"] > 200
    assert happened["PeerViolation"] > 50


@pytest.mark.parametrize("target", fuzzed_proofs.TARGETS, ids=lambda target: target.name)
def test_changed_proofs_raise_only_typed_errors(target: Target) -> None:
    counts = run([target], 240, 3, lambda _line: None)
    assert counts[f"{target.name} accepted"] > 15, "so the unchanged ones are right"
    assert counts[f"{target.name} raised PeerViolation"] > 20
    assert counts[f"{target.name} raised IntegrityError"] > 5
    assert {name.rsplit(" ", 1)[1] for name in counts if " raised " in name} <= {
        "PeerViolation",
        "IntegrityError",
        "PeerRefused",
        "UnprovenToOutsiders",  # a PeerViolation
    }


def test_round_keeps_no_more_of_strangers_than_it_says() -> None:
    """So many that each bound is reached; the roster is heard beyond them."""
    strangers = [f"stranger {number}" for number in range(MAX_HEARD + 200)]
    group = signed()
    state = begin(setup(), accused={})
    for peer in strangers:
        for event in (
            Sighted(peer=peer),
            Reported(peer=peer, ready=ready()),
            vote_of(peer, group, outcome(group)),
            Lost(peer=peer, reason="it broke"),
        ):
            state, _ = step(state, event, 0.0)
    assert (len(state.known), len(state.reports), len(state.votes["prepare"])) == (MAX_HEARD,) * 3
    check_bounded(state)


def test_hostile_files_of_a_tokenizer_raise_only_typed_errors() -> None:
    target = replace(FILES_TARGET, every=1)
    try:
        counts = run([target], 48, 3, lambda _line: None)
    finally:
        process().close()
        process.cache_clear()
    assert counts[f"{target.name} accepted"] > 10
    assert counts[f"{target.name} refused"] > 10
    assert {name.rsplit(" ", 1)[1] for name in counts if " raised " in name} <= {"IntegrityError", "ConfigError"}


def test_answers_of_a_tokenizers_process_without_sense_raise_only_typed_errors() -> None:
    counts = run([REPLY_TARGET], 4000, 3, lambda _line: None)
    assert counts[f"{REPLY_TARGET.name} accepted"] > 500
    assert counts[f"{REPLY_TARGET.name} raised IntegrityError"] > 500
    assert not [name for name in counts if " raised " in name and not name.endswith("IntegrityError")]
