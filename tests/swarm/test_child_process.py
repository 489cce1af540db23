"""Limits of time of a child process that stops within a message."""

from __future__ import annotations

import time
from multiprocessing import Pipe

import pytest
from swarm.child_process import ChildFailure, ChildProcess
from swarm.serving.grammar import grammar_masks

WITHIN_S = 2.0
LARGE = bytes(1 << 24)
"""More than a pipe holds."""


@pytest.mark.parametrize(("stalls", "message"), [("listening", LARGE), ("answering", b"")])
def test_child_that_stops_within_a_message_is_given_up_in_time(stalls: str, message: bytes) -> None:
    child = ChildProcess("support.stalling_child", environment={"STALLS": stalls}, memory_bytes=2**30)
    started_s = time.monotonic()
    with pytest.raises(ChildFailure, match="it took over 2 s"):
        child.ask(message, within_s=WITHIN_S, max_bytes=1000)
    assert time.monotonic() - started_s < 60.0


@pytest.mark.parametrize(("answer", "message"), [(b"", LARGE), (b"\0\0\0\x64half", b"")])
def test_grammar_s_process_that_stops_within_a_message_is_given_up_in_time(answer: bytes, message: bytes) -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        theirs._send(answer)  # type: ignore[attr-defined]
        assert grammar_masks._ask(ours, message, 0.1) == b""
