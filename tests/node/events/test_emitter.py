"""The contract in code, docs/reference/events.md and an Emitter's output agree, and the live line is drawn
correctly.
"""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from support.site_pages import script
from swarm_node.events.emitter import EVENTS, EVERY_S, WIPE, Emitter, LiveLine, problems
from swarm_node.formatting import progress
from swarm_node.roles.serving import serving_line
from swarm_protocol.control_messages import ServingStatus
from swarm_protocol.errors import ConfigError

SAMPLES = {"text": "word", "int": 3, "number": 1.5, "bool": True, "list": ["a", "b"], "object": {"a": 1}}


def sample(event: str, *, with_nulls: bool = False) -> dict[str, object]:
    spec = EVENTS[event]
    types = {field: spec.field_type(field) for field in spec.fields}
    return {field: None if nullable and with_nulls else SAMPLES[name] for field, (name, nullable) in types.items()}


def emitted(event: str, *, as_json: bool, **fields: object) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    Emitter(json=as_json, out=out, err=err).emit(event, **fields)
    return out.getvalue(), err.getvalue()


def test_docs_of_events_are_what_the_code_says() -> None:
    page = Path(__file__).parents[3] / "docs" / "reference" / "events.md"
    assert page.read_text(encoding="utf-8") == script("contracts").events_page(), "run docs/contracts.py"


@pytest.mark.parametrize("with_nulls", [False, True])
def test_emit_each_event_prints_json_for_programs_and_text_for_people(with_nulls: bool) -> None:
    for event, spec in EVENTS.items():
        fields = sample(event, with_nulls=with_nulls)
        out, err = emitted(event, as_json=True, **fields)
        line = json.loads(out)
        assert line["event"] == event
        assert problems(line) == []
        assert bool(err) == bool(spec.text), event
        assert emitted(event, as_json=False, **fields) == ("", err), f"{event}: stdout is left to results"


def test_tokens_per_second_name_the_node_or_the_run() -> None:
    def line(event: str) -> str:
        return emitted(event, as_json=False, **sample(event))[1]

    assert "tokens/s here," in line("outer_step")
    assert "tokens/s in all," in line("committed")
    untrained = sample("outer_step") | {"tokens_per_s": 0.0}
    assert "tokens/s" not in emitted("outer_step", as_json=False, **untrained)[1], "a newcomer's first step"


@pytest.mark.parametrize(("num", "said"), [(0, "0 trainers"), (1, "1 trainer"), (2, "2 trainers")])
def test_counts_in_a_message_agree_with_singular_and_plural(num: int, said: str) -> None:
    fields = sample("outer_step") | {"num_trainers": num}
    assert f", {said}, " in emitted("outer_step", as_json=False, **fields)[1]
    peers = sample("resume_delivered") | {"peers": ["peer"] * num}
    assert f"with {said.replace('trainer', 'member')}: " in emitted("resume_delivered", as_json=False, **peers)[1]
    finished = sample("run_finished") | {"outer_step": num}
    assert f"after {said.replace('trainer', 'outer step')}\n" in emitted("run_finished", as_json=False, **finished)[1]


def test_emit_of_an_event_outside_the_contract_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="unknown event"):
        emitted("no_such", as_json=True)
    with pytest.raises(AssertionError, match="ready lacks addrs"):
        emitted("ready", as_json=True, peer_id="x", name="", network_id="", home="")
    with pytest.raises(AssertionError, match="undocumented field more"):
        emitted("left", as_json=True, pid=1, more=2)
    with pytest.raises(AssertionError, match="not int"):
        emitted("left", as_json=True, pid="one")
    with pytest.raises(AssertionError, match="not int"):
        emitted("left", as_json=True, pid=True)


def test_emit_of_a_number_that_json_lacks_prints_null() -> None:
    fields = sample("interval") | {"loss": math.nan}
    assert json.loads(emitted("interval", as_json=True, **fields)[0])["loss"] is None


def test_error_prints_one_line_and_its_remedy() -> None:
    out, err = io.StringIO(), io.StringIO()
    Emitter(json=True, out=out, err=err).error(ConfigError("it is broken", remedy="mend it"))
    assert err.getvalue() == "error: it is broken\n  → mend it\n"
    assert json.loads(out.getvalue()) | {"time": 0} == {
        "event": "error",
        "time": 0,
        "message": "it is broken",
        "remedy": "mend it",
    }


def test_emit_of_a_daemon_continues_when_its_reader_is_gone() -> None:
    class Gone(io.StringIO):
        def write(self, _text: str) -> int:
            raise BrokenPipeError

    Emitter(json=True, goes_on=True, out=Gone(), err=io.StringIO()).emit("left", pid=1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """Return what a person sees: the finished lines, and the last one."""
        lines = self.getvalue().replace("\r\x1b[K", "\x00").split("\n")
        return [line.rpartition("\x00")[2].rstrip("\r") for line in lines]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def able_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


def test_live_line_on_a_terminal_replaces_itself_and_stays_below_others() -> None:
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


def test_live_line_without_a_terminal_is_printed_now_and_then_for_each_kind() -> None:
    log, clock = io.StringIO(), Clock()
    line = LiveLine(log, clock=clock)
    for text in ("a 1", "a 2"):
        line.show("a", text)
    line.show("b", "b 1")
    clock.now_s = EVERY_S
    line.show("b", "b 1")  # an idle server fills no log
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
    assert WIPE not in terminal.getvalue().rpartition("stopped")[2], "nothing may be drawn after the last event"


def test_event_with_the_same_reason_is_printed_once_and_then_counted() -> None:
    out, err = io.StringIO(), io.StringIO()
    emitter = Emitter(json=True, out=out, err=err)
    for attempt in range(25):
        emitter.emit("round_aborted", run="x", step=3, attempt=attempt, reason=f"waited {attempt}.5 s", missing=())
    emitter.emit("round_aborted", run="x", step=3, attempt=25, reason="the owner is gone", missing=())
    assert err.getvalue().splitlines() == [
        "step 3, attempt 0 failed: waited 0.5 s",
        "step 3, attempt 9 failed: waited 9.5 s (10 times so far)",
        "step 3, attempt 25 failed: the owner is gone",
    ]
    assert len(out.getvalue().splitlines()) == 26, "programs must get each event"


@pytest.mark.parametrize(
    ("event", "seconds", "said"),
    [
        ("draining", 30.0, "○ draining (drain): leaving within 30 s; Ctrl-C leaves at once"),
        ("draining", 0.5, "○ draining (drain): leaving at once"),
        ("leaving", 30.0, "the daemon (pid 7) leaves within 30 s"),
        ("leaving", 0.0, "the daemon (pid 7) leaves at once"),
    ],
)
def test_time_to_leave_of_less_than_a_second_is_written_as_at_once(event: str, seconds: float, said: str) -> None:
    err = io.StringIO()
    fields: dict[str, object] = {"reason": "drain"} if event == "draining" else {"pid": 7}
    Emitter(json=False, err=err).emit(event, seconds=seconds, **fields)
    assert err.getvalue() == f"{said}\n"


def test_line_that_cannot_be_written_is_dropped() -> None:
    class Gone(Terminal):
        def write(self, _text: str) -> int:
            raise BrokenPipeError

    emitter = Emitter(json=False, err=Gone())
    emitter.status("serving", "SERVING")
    emitter.error(ConfigError("it cannot be", remedy="mend it"))


def test_progress_and_serving_in_words() -> None:
    assert progress(1.2 * 2**30, 2.4 * 2**30, 4) == "[██··] 50 %, 1.2 GiB of 2.4 GiB"
    assert progress(0, 0, 2) == "[██] 100 %, 0 B of 0 B"
    status = ServingStatus(model="m", start=12, end=20, num_sessions=1, tokens_per_s=41.2)
    assert serving_line(status, 32) == "SERVING blocks 12:20 of 32, 41 tok/s"
