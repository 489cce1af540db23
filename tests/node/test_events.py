"""The contract in code, in docs/events.md, and in what an Emitter prints are one."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from swarm_node import event_contract
from swarm_node.events import Emitter
from swarm_protocol.errors import ConfigError

SAMPLES = {"text": "word", "int": 3, "number": 1.5, "bool": True, "list": ["a", "b"], "object": {"a": 1}}


def sample(event: str, *, with_nulls: bool = False) -> dict[str, object]:
    spec = event_contract.EVENTS[event]
    types = {field: spec.field_type(field) for field in spec.fields}
    return {field: None if nullable and with_nulls else SAMPLES[name] for field, (name, nullable) in types.items()}


def emitted(event: str, *, as_json: bool, **fields: object) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    Emitter(json=as_json, out=out, err=err).emit(event, **fields)
    return out.getvalue(), err.getvalue()


def test_docs_of_events_are_what_the_code_says() -> None:
    page = Path(__file__).parents[2] / "docs" / "events.md"
    assert page.read_text(encoding="utf-8") == event_contract.render(), (
        "run python -m swarm_node.event_contract > docs/events.md"
    )


@pytest.mark.parametrize("event", event_contract.EVENTS)
@pytest.mark.parametrize("with_nulls", [False, True])
def test_emit_each_event_prints_json_for_programs_and_text_for_people(event: str, with_nulls: bool) -> None:
    fields = sample(event, with_nulls=with_nulls)
    out, err = emitted(event, as_json=True, **fields)
    line = json.loads(out)
    assert line["event"] == event
    assert event_contract.problems(line) == []
    assert bool(err) == bool(event_contract.EVENTS[event].text)
    assert emitted(event, as_json=False, **fields) == ("", err), "without --json stdout is left to results"


def test_tokens_per_second_of_a_run_say_whose_they_are() -> None:
    def line(event: str) -> str:
        return emitted(event, as_json=False, **sample(event))[1]

    assert "tokens/s here," in line("outer_step")
    assert "tokens/s in all," in line("committed")


def test_emit_beside_the_contract_is_a_bug() -> None:
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


def test_emit_to_a_reader_that_is_gone_goes_on() -> None:
    class Gone(io.StringIO):
        def write(self, _text: str) -> int:
            raise BrokenPipeError

    Emitter(json=True, out=Gone(), err=io.StringIO()).emit("left", pid=1)
