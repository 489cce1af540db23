"""The whole demo, short, with real processes: libp2p, training, serving, OpenAI's client, kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import forked_fleet
from support.forked_node import ForkedNode
from swarm_node.events import emitter
from transformers import AutoModelForCausalLM, AutoTokenizer

SHORT = ("--nodes", "4", "--outer-steps", "2", "--interval-steps", "2", "--min-tokens", "40", "--json")
GREEDY = ("--temperature", "0")  # so that transformers' own generate can be compared


WITH_SCRIPTS = """
import sys
from swarm_node.demo import nodes
nodes.Fleet.__init__.__kwdefaults__["program"] = (sys.executable, "-S", "-c", sys.argv.pop(1))
from swarm_node.__main__ import main
main()
"""
"""Run the demo with processes of the script that is named first, in place of nodes."""

UNSIGNED = """
from swarm_node.demo import stages
stages._write_run = lambda *_: 1
"""
"""Sign no run for those that read none: that imports torch, for three seconds of the processor."""

SILENT_NODE = "import time; time.sleep(1000)"
READY_NODE = """
import json, time
print(json.dumps({"event": "ready", "peer_id": "x", "addrs": ["/ip4/127.0.0.1/tcp/1/p2p/x"]}), flush=True)
time.sleep(1000)
"""
LIGHT_NODE = """
import os, sys
words = sys.argv[1:]
if "--run" in words:
    words[words.index("--run"):] = ["--take", "nothing", "--probe", "off"]
os.execv(sys.executable, [sys.executable, "-m", "swarm_node", *words])
"""
"""A seed is what it is. A volunteer is a real node too, but takes no work: it does not import torch to be killed."""


@contextmanager
def _demo(*arguments: str, script: str = "", is_signed: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Start a demo that is stopped if the test fails.

    Its nodes run `script`, if given, and its run is signed if `is_signed`.
    """
    program = ["-c", WITH_SCRIPTS if is_signed else UNSIGNED + WITH_SCRIPTS, script] if script else ["-m", "swarm_node"]
    with subprocess.Popen(
        [sys.executable, *program, "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as demo:
        try:
            yield demo
        finally:
            if demo.poll() is None:
                demo.terminate()
                demo.communicate(timeout=120)


def _descendants(root: Path) -> list[psutil.Process]:
    """Return every process that works below `root`: nodes, and libp2p daemons with an identity there."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if process.pid != os.getpid() and any(str(root) in word for word in process.info["cmdline"] or ())
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str, Path]:
    """Return the events and the text of one whole demo, and the directory that it kept.

    Its processes are forks of one that has torch. `tests/chaos/test_chaos_demo.py` has it as programs, as those below.
    """
    root = tmp_path_factory.mktemp("demo") / "kept"
    err_path = root.parent / "err"
    arguments = ("demo", *SHORT, *GREEDY, "--keep", str(root))
    demo = ForkedNode(arguments, environment=dict(os.environ), err_path=err_path, begin=forked_fleet.begin())
    with demo.stdout:
        out = demo.stdout.read()
    err = err_path.read_text()
    assert demo.wait() == 0, f"{err}\n{out[-2000:]}"
    return [json.loads(line) for line in out.splitlines()], err, root


def test_every_event_holds_to_the_contract_and_the_last_is_the_summary(finished: Any) -> None:
    events, _, _ = finished
    assert [problem for event in events for problem in emitter.problems(event)] == []
    assert [event["event"] for event in events].count("summary") == 1
    assert events[-1]["event"] == "summary"


def test_summary_says_what_happened(finished: Any) -> None:
    events, _, _ = finished
    summary = events[-1]
    steps = [event for event in events if event["event"] == "progress"]
    assert [step["outer_step"] for step in steps] == [1, 2]
    assert (summary["nodes"], summary["outer_steps"]) == (4, 2)
    assert summary["digests_equal"]
    assert all(step["digests_equal"] for step in steps)
    assert summary["loss_last"] < summary["loss_first"] - 0.1
    assert 5 < summary["loss_first"] < 6, "an untrained byte-level model has a loss of about ln 256 = 5.5 nats"
    # int8 both ways, and each owner's copy for its backup: 2 * 3/4 + 1/4 bytes among four members, 2 * 2/3 + 1/3 among
    # three; scales and votes add 2 %
    assert 1.6 < summary["bytes_per_param_per_step"] < 1.9
    assert 0 < summary["tokens_per_s"] < 1e6
    assert summary["seconds"] > 0


def test_answer_is_whole_when_a_node_is_killed(finished: Any) -> None:
    events, _, _ = finished
    summary = events[-1]
    names = [event["event"] for event in events]
    killed = names.index("killed")
    tokens = [event["text"] for event in events if event["event"] == "token"]
    assert "token" in names[:killed], "it was killed before it had done anything"
    assert "token" in names[killed:], "there was nothing left to lose"
    assert "".join(tokens) == summary["completion"]
    assert summary["tokens"] == len(tokens) >= 40
    assert summary["killed"] == events[killed]["name"]
    assert summary["tokens_identical"]
    assert 0 < summary["failover_ms"] < 30_000


def test_checkpoint_is_kept_and_says_the_same(finished: Any) -> None:
    events, _, root = finished
    summary = events[-1]
    checkpoint = Path(summary["checkpoint"])
    assert root in checkpoint.parents
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    assert model.num_parameters() == summary["parameters"]
    ids = tokenizer(summary["prompt"], return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=summary["tokens"], do_sample=False)
    assert tokenizer.decode(out[0, ids.shape[1] :]) == summary["completion"]


def test_text_on_stderr_says_the_same_as_the_events(finished: Any) -> None:
    events, err, root = finished
    assert "outer step 2/2" in err
    assert events[-1]["prompt"] + events[-1]["completion"][:5] in err
    assert str(root) in err


def test_demo_leaves_no_process(finished: Any) -> None:
    _, _, root = finished
    assert _descendants(root) == []


def _long(root: Path) -> tuple[str, ...]:
    """Start a demo of a seed and two nodes that does not end by itself."""
    return ("--nodes", "2", "--outer-steps", "1000", "--interval-steps", "1", "--json", "--keep", str(root))


@pytest.mark.parametrize(
    ("number", "stage", "num_processes", "script"),
    [(signal.SIGTERM, 1, 1, SILENT_NODE), (signal.SIGINT, 2, 4, READY_NODE)],
    ids=["SIGTERM while starting", "Ctrl-C in training"],
)
def test_interrupted_demo_leaves_nothing(
    tmp_path: Path, number: signal.Signals, stage: int, num_processes: int, script: str
) -> None:
    """The whole demo's test shows that real nodes leave nothing either, since it ends them in the same manner."""
    root = tmp_path / "kept"
    with _demo(*_long(root), script=script, is_signed=stage == 1) as demo:  # torch is just being imported in stage 1
        assert demo.stdout is not None
        for line in demo.stdout:
            if json.loads(line).get("number") == stage:
                break
        assert len(_descendants(root)) >= num_processes
        demo.send_signal(number)
        _, err = demo.communicate(timeout=120)
    assert demo.returncode == 128 + number, err
    assert "Traceback" not in err
    assert _descendants(root) == []


def test_killed_demo_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "kept"
    with _demo(*_long(root), script=LIGHT_NODE) as demo:
        # a seed that is up, with its libp2p, and two nodes that have hardly begun: none may remain
        until = time.monotonic() + 60
        while len(left := _descendants(root)) < 5 and time.monotonic() < until:
            time.sleep(0.02)
        demo.kill()
        demo.wait()
        _, alive = psutil.wait_procs(left, timeout=120)
        for process in alive:
            process.kill()
    assert len(left) >= 5
    assert alive == _descendants(root) == []
    for name in ("seed", "node-1", "node-2"):
        assert "stopped: the process that started this node is gone" in (root / f"{name}.log").read_text()
