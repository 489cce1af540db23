"""The line at the foot of a terminal, and what becomes of it where there is none."""

from __future__ import annotations

import io

import pytest
from swarm_node.events import Emitter
from swarm_node.formatting import progress
from swarm_node.live_line import EVERY_S, WIPE, LiveLine
from swarm_node.serving import told
from swarm_protocol.control_messages import ServingStatus
from swarm_protocol.errors import ConfigError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """What a person sees: the lines that stayed, and the last one."""
        lines = self.getvalue().replace("\r\x1b[K", "\x00").split("\n")
        return [line.rpartition("\x00")[2].rstrip("\r") for line in lines]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def able_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


def test_line_on_a_terminal_is_drawn_over_itself_and_stays_below_others() -> None:
    terminal = Terminal()
    line = LiveLine(terminal)
    line.show("a", "one")
    line.show("b", "two")
    line.above("[1/2] done")
    assert terminal.screen() == ["[1/2] done", "two"]
    line.end()
    line.above("stopped")
    assert terminal.screen() == ["[1/2] done", "stopped", ""]


def test_line_is_cut_to_the_terminal_and_cleaned() -> None:
    terminal = Terminal()
    LiveLine(terminal).show("a", "x\x1b[2J" + "y" * 500)
    [shown] = terminal.screen()
    assert len(shown) == 79
    assert "\x1b" not in shown


def test_line_without_a_terminal_is_printed_now_and_then_for_each_kind() -> None:
    log, clock = io.StringIO(), Clock()
    line = LiveLine(log, clock=clock)
    for text in ("a 1", "a 2"):
        line.show("a", text)
    line.show("b", "b 1")
    clock.now_s = EVERY_S
    line.show("a", "a 3")
    line.end()
    assert log.getvalue() == "a 1\nb 1\na 3\n"


def test_dumb_terminal_gets_log_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    LiveLine(terminal).show("a", "one")
    assert terminal.getvalue() == "one\n"


def test_emitter_draws_a_download_over_itself_and_wipes_it_when_it_stops() -> None:
    terminal = Terminal()
    emitter = Emitter(json=False, err=terminal)
    for done in (0, 50, 100):
        emitter.emit("downloading", model="tiny", num_bytes=done, total_bytes=100)
    assert terminal.screen() == [f"downloading tiny: {progress(100, 100)}"]
    emitter.emit("step", number=6, of=8, title="weights", detail="all here")
    assert terminal.screen()[0] == "[6/8] weights: all here"
    emitter.emit("stopped", reason="done", clean=True)
    assert WIPE not in terminal.getvalue().rpartition("stopped")[2], "nothing is drawn after the last word"


def test_same_complaint_is_told_once_and_then_counted() -> None:
    out, err = io.StringIO(), io.StringIO()
    emitter = Emitter(json=True, out=out, err=err)
    for attempt in range(25):
        emitter.emit("round_aborted", run="x", step=3, attempt=attempt, reason=f"waited {attempt}.5 s", missing=())
    emitter.emit("round_aborted", run="x", step=3, attempt=25, reason="the owner is gone", missing=())
    assert err.getvalue().splitlines() == [
        "step 3, attempt 0: waited 0.5 s",
        "step 3, attempt 9: waited 9.5 s (10 times by now)",
        "step 3, attempt 25: the owner is gone",
    ]
    assert len(out.getvalue().splitlines()) == 26, "programs are told each time"


def test_line_that_cannot_be_written_is_let_go() -> None:
    class Gone(Terminal):
        def write(self, _text: str) -> int:
            raise BrokenPipeError

    emitter = Emitter(json=False, err=Gone())
    emitter.status("serving", "SERVING")
    emitter.error(ConfigError("it cannot be", remedy="mend it"))


def test_progress_and_serving_in_words() -> None:
    assert progress(1.2e9, 2.4e9, 4) == "[██··] 50 %, 1.2 GB of 2.4 GB"
    assert progress(0, 0, 2) == "[██] 100 %, 0 B of 0 B"
    status = ServingStatus(model="m", start=12, end=20, num_sessions=1, tokens_per_s=41.2)
    assert told(status, 32) == "SERVING blocks 12:20 of 32, 41 tok/s"
