"""Fault scripts: they strike who, when and how they say, tell what fired, and work across a real process's death."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.faults import SCRIPT_VARIABLE, Fault, FaultScript
from swarm.network.interface import no_failpoints
from swarm.testing import virtual_time
from swarm_protocol.errors import ConfigError, PeerUnreachable

CHILD = """
import asyncio
from support.faults import FaultScript

async def main():
    faults = FaultScript.from_environment().hook("trainer-1")
    for phase in ("group", "reduce", "commit"):
        await faults.reached(phase)
        print(phase, flush=True)

asyncio.run(main())
"""


def run_child(script: FaultScript, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **script.environment(folder)}
    return subprocess.run(
        [sys.executable, "-c", CHILD],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_reached_at_the_nth_hit_of_the_named_one_strikes_once() -> None:
    script = FaultScript([Fault(who="a", phase="send", what="raise", nth=2)])

    async def main() -> None:
        a, b = script.hook("a"), script.hook("b")
        for hook in (b, b, b, a):
            await hook.reached("send")
        with pytest.raises(PeerUnreachable, match="fault script: raise a at send"):
            await a.reached("send")
        await a.reached("send")

    virtual_time.run(main())
    script.assert_all_fired()
    assert script.fired == script.faults


def test_reached_by_anyone_counts_hits_of_all() -> None:
    struck: list[str] = []
    script = FaultScript([Fault(who="*", phase="send", what=struck.append, nth=3)])

    async def main() -> None:
        for who in ("a", "b", "c", "d"):
            await script.hook(who).reached("send")

    virtual_time.run(main())
    assert struck == ["c"]


def test_reached_with_delay_waits_and_with_stall_waits_for_ever() -> None:
    script = FaultScript(
        [
            Fault(who="a", phase="slow", what="delay", delay_s=30),
            Fault(who="a", phase="stuck", what="stall"),
        ]
    )

    async def main() -> None:
        hook, loop = script.hook("a"), asyncio.get_running_loop()
        start_s = loop.time()
        await hook.reached("slow")
        assert loop.time() - start_s == pytest.approx(30)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600):
                await hook.reached("stuck")

    virtual_time.run(main())
    script.assert_all_fired()


def test_kill_in_one_event_loop_calls_the_killer_and_the_struck_task_goes_no_further() -> None:
    killed: list[str] = []
    script = FaultScript([Fault(who="a", phase="reduce", what="kill")], kill=killed.append)

    async def main() -> None:
        task = asyncio.create_task(script.hook("a").reached("reduce"))
        await asyncio.sleep(1)
        assert killed == ["a"]
        assert not task.done()
        task.cancel()
        await asyncio.wait({task})

    virtual_time.run(main())


def test_assert_all_fired_names_what_did_not_and_what_was_reached() -> None:
    script = FaultScript([Fault(who="a", phase="commit", what="stall"), Fault(who="a", phase="x", what="kill", nth=9)])

    async def main() -> None:
        await script.hook("a").reached("x")

    virtual_time.run(main())
    with pytest.raises(
        AssertionError, match=r"never fired: stall a at commit \(hit 1\); kill a at x \(hit 9\)\. Reached here: a: x x1"
    ):
        script.assert_all_fired()


def test_two_equal_faults_must_both_fire() -> None:
    fault = Fault(who="a", phase="x", what="raise")
    script = FaultScript([fault, fault])

    async def main() -> None:
        with pytest.raises(PeerUnreachable):
            await script.hook("a").reached("x")

    virtual_time.run(main())
    with pytest.raises(AssertionError, match="never fired"):
        script.assert_all_fired()


def test_no_faults_does_nothing_and_lets_nobody_else_run() -> None:
    async def main() -> None:
        other = asyncio.create_task(asyncio.sleep(0))
        await no_failpoints.reached("anything")
        assert not other.done()
        await other

    virtual_time.run(main())


@pytest.mark.parametrize(
    "wrong",
    [{"what": "explode"}, {"what": "kill", "nth": 0}, {"what": "delay"}, {"what": "kill", "delay_s": 1.0}],
    ids=["what", "nth", "delay missing", "delay elsewhere"],
)
def test_fault_with_impossible_values_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"fault|nth|delay_s"):
        Fault(who="a", phase="x", **wrong)


def test_kill_in_a_real_process_ends_it_by_sigkill_and_leaves_its_mark(tmp_path: Path) -> None:
    script = FaultScript([Fault(who="trainer-1", phase="reduce", what="kill")])
    child = run_child(script, tmp_path)
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert child.stdout == "group\n"
    script.assert_all_fired()


def test_fault_that_a_process_never_reaches_is_missed_by_the_parent(tmp_path: Path) -> None:
    script = FaultScript([Fault(who="trainer-2", phase="reduce", what="kill")])
    child = run_child(script, tmp_path)
    assert (child.returncode, child.stdout) == (0, "group\nreduce\ncommit\n")
    with pytest.raises(AssertionError, match="never fired: kill trainer-2"):
        script.assert_all_fired()


def test_callable_cannot_be_passed_to_a_process(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="callable"):
        FaultScript([Fault(who="a", phase="x", what=print)]).environment(tmp_path)


def test_from_environment_without_a_script_has_no_faults() -> None:
    assert FaultScript.from_environment({}).faults == ()


@pytest.mark.parametrize("text", ["", "nonsense", "[]", '{"faults": [{"who": 1}], "folder": "/"}', '{"faults": []}'])
def test_from_environment_with_garbage_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match="no fault script"):
        FaultScript.from_environment({SCRIPT_VARIABLE: text})


def test_hits_are_counted_by_who_and_phase() -> None:
    script = FaultScript([])

    async def main() -> None:
        for who, phase in (("a", "x"), ("a", "x"), ("b", "x")):
            await script.hook(who).reached(phase)

    virtual_time.run(main())
    assert script.num_hits == Counter({("a", "x"): 2, ("b", "x"): 1})
