"""The state that the demo derives from its nodes' events, and its display."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console
from swarm_node.demo.command import DemoPlan
from swarm_node.demo.display import LineDisplay, Reporter, make_display, panel
from swarm_node.demo.nodes import DemoState
from swarm_node.demo.stages import run_of
from swarm_node.events.emitter import Emitter
from swarm_node.formatting import sparkline


def _step(step: int, digest: str = "aa", bytes_sent: int = 150, loss: float | None = 2.5) -> dict[str, Any]:
    return {
        "event": "outer_step",
        "step": step,
        "loss": loss,
        "digest": digest,
        "group": ["a", "b"],
        "num_tokens": 1000,
        "bytes_sent": bytes_sent,
        "tokens_per_s": 50.0,
    }


def _state(*events: tuple[str, dict[str, Any]]) -> DemoState:
    state = DemoState(num_nodes=2, outer_steps=3, num_parameters=100)
    for name in ("node-1", "node-2"):
        state.apply(name, {"event": "ready", "peer_id": f"peer of {name}", "addrs": []})
    for name, event in events:
        state.apply(name, event)
    return state


def _serving(start: int, end: int) -> dict[str, Any]:
    return {"event": "serving", "model": "demo", "start": start, "end": end}


def test_step_counts_only_when_every_node_has_committed_it() -> None:
    state = _state(("node-1", _step(1)))
    assert not state.all_at(1)
    state.apply("node-2", _step(1))
    assert state.all_at(1)
    assert state.digests_equal()


def test_one_different_digest_at_any_step_is_reported() -> None:
    state = _state(("node-1", _step(1)), ("node-2", _step(1, "bb")), ("node-1", _step(2)), ("node-2", _step(2)))
    assert not state.digests_equal()


def test_bytes_are_the_mean_over_members_and_steps_by_parameter() -> None:
    state = _state(("node-1", _step(1, bytes_sent=100)), ("node-2", _step(1, bytes_sent=200)))
    assert state.bytes_per_param() == 1.5


def test_losses_come_in_the_order_of_their_steps() -> None:
    state = _state(
        ("node-1", _step(2, loss=1.0)),
        ("node-1", _step(1, loss=2.0)),
        ("node-2", _step(1, loss=None)),
    )
    assert state.loss_curve() == [2.0, 1.0]


def test_validation_is_kept_by_its_step() -> None:
    state = _state(
        ("node-1", {"event": "validated", "step": 0, "loss": 5.5}),
        ("node-2", {"event": "validated", "step": 0, "loss": None}),
        ("node-2", {"event": "validated", "step": 3, "loss": 2.5}),
    )
    assert state.validation == {0: 5.5, 3: 2.5}


@pytest.mark.parametrize(
    ("spans", "survives"), [([(0, 4), (0, 4)], True), ([(0, 4), (0, 2)], False), ([(0, 2), (2, 4)], False)]
)
def test_blocks_must_be_served_twice_to_survive_a_death(spans: list[tuple[int, int]], survives: bool) -> None:
    state = _state(*((f"node-{index + 1}", _serving(*span)) for index, span in enumerate(spans)))
    assert state.survives_any_death(4) is survives


def test_peer_is_found_by_its_id() -> None:
    node = _state().by_peer("peer of node-2")
    assert node is not None
    assert node.name == "node-2"
    assert _state().by_peer("stranger") is None


def test_unknown_event_is_ignored() -> None:
    assert _state(("node-1", {"event": "news"})).node("node-1").state == "ready"


def test_lines_count_each_committed_step_once() -> None:
    out = io.StringIO()
    display = make_display(Console(file=out, width=40))
    assert isinstance(display, LineDisplay)
    state = _state(("node-1", _step(1)), ("node-2", _step(1)), ("node-1", _step(2)))
    reporter = Reporter(state, display, Emitter(json=False, err=io.StringIO()))
    reporter.node_said("node-1", {})
    reporter.node_said("node-1", {})
    assert out.getvalue().count("outer step 1/3") == 1
    assert "outer step 2/3" not in out.getvalue()
    assert "aa equal on 2 of 2 nodes" in out.getvalue()
    assert len(out.getvalue().splitlines()) == 1


def test_differing_states_stand_out() -> None:
    out = io.StringIO()
    LineDisplay(Console(file=out)).step(_state(("node-1", _step(1)), ("node-2", _step(1, "bb"))), 1)
    assert "DIFFERS" in out.getvalue()


def test_panel_shows_every_node_and_the_loss() -> None:
    out = io.StringIO()
    state = _state(("node-1", _step(1)), ("node-2", _serving(0, 2)))
    Console(file=out, width=200).print(panel(state))
    assert "loss 2.500" in out.getvalue()
    assert "0 to 2" in out.getvalue()
    assert [line.split()[0] for line in out.getvalue().splitlines()[-2:]] == ["node-1", "node-2"]


def test_terminal_gets_a_live_panel_that_leaves_it_as_it_was() -> None:
    out = io.StringIO()
    display = make_display(Console(file=out, force_terminal=True, width=120))
    display.stage("train")
    display.update(_state())
    display.token("def f():\n    [red]")
    display.killed("node-1")
    display.close()
    assert "\x1b[?25l" in out.getvalue(), "the cursor must be hidden while the panel is live"
    assert out.getvalue().rindex("\x1b[?25h") > out.getvalue().rindex("\x1b[?25l")
    assert "[red]" in out.getvalue(), "a model's text must not be markup"


def _screen(written: str) -> str:
    """Return what remains on a terminal, after the few control codes that a panel uses."""
    lines, row, column = [""], 0, 0
    for code, char in re.findall(r"\x1b\[([?0-9;]*[A-Za-z])|(.)", written, flags=re.DOTALL):
        if code.endswith("A"):
            row -= int(code[:-1])
        elif code == "2K":
            lines[row] = ""
        elif char == "\r":
            column = 0
        elif char == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif char:
            lines[row] = lines[row].ljust(column)[:column] + char + lines[row][column + 1 :]
            column += 1
    return "\n".join(line.rstrip() for line in lines).rstrip()


def test_terminal_keeps_no_panel_of_a_stage_without_an_outer_step() -> None:
    out = io.StringIO()
    display = make_display(Console(file=out, force_terminal=True, width=120))
    display.stage("start")
    display.update(DemoState(num_nodes=2))
    assert "node" not in _screen(out.getvalue()), "nothing is shown of nodes that have not started"
    state = _state()
    display.update(state)
    display.stage("train")
    assert "ready" in out.getvalue(), "the starting nodes are shown"
    assert _screen(out.getvalue()).splitlines() == ["▸ start", "▸ train"]
    state.apply("node-1", _step(1))
    display.update(state)
    display.stage("serve")
    assert "outer step 1/3   loss 2.500" in _screen(out.getvalue())


def test_sparkline_is_lowest_at_the_lowest_value() -> None:
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""
    assert len(sparkline([float(value) for value in range(100)], width=10)) == 10


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_new_tokens": 512},
        {"prompt": ""},
        {"prompt": "é" * 177},
    ],
)
def test_impossible_plan_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="prompt"):
        DemoPlan(**wrong)


def test_run_has_the_values_of_the_plan() -> None:
    run = run_of(DemoPlan(num_nodes=2, outer_steps=3))
    assert (run.outer_steps, run.max_group) == (3, 2)


@pytest.mark.parametrize(("num_nodes", "blocks"), [(2, 6), (3, 6), (4, 3), (16, 3)])
def test_nodes_serve_blocks_such_that_one_of_them_may_die(num_nodes: int, blocks: int) -> None:
    assert DemoPlan(num_nodes=num_nodes).blocks_per_node == blocks
