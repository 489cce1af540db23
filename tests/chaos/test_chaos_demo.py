"""The whole demo as programs, short: `tests/node/demo` has it in the default suite, with forks in their place.

.venv/bin/python -m pytest tests/chaos/test_chaos_demo.py -m chaos -s
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

SHORT = ("--nodes", "4", "--outer-steps", "2", "--interval-steps", "2", "--min-tokens", "40", "--temperature", "0")


def test_demo_of_started_programs_loses_a_server_and_no_token(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "swarm_node", "demo", *SHORT, "--json", "--keep", str(tmp_path / "kept")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{done.stderr}\n{done.stdout[-2000:]}"
    *events, summary = map(json.loads, done.stdout.splitlines())
    assert summary["event"] == "summary"
    assert (summary["nodes"], summary["outer_steps"], summary["digests_equal"]) == (4, 2, True)
    assert summary["killed"] in {event["name"] for event in events if event["event"] == "killed"}
    assert summary["tokens"] >= 40
    assert summary["tokens_identical"]
