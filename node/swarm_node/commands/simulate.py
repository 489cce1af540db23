"""`swarm-node simulate`: simulates a network of thousands of nodes in virtual time and writes a report.

With a [plan] table it simulates several times, and finds how many nodes of a class are enough. The scenario is a TOML
file (see `swarm.simulation.scenario` and the guide). The report goes to two files: HTML for people and JSON for
programs.
"""

from __future__ import annotations

import time
from pathlib import Path

from swarm.simulation.capacity_planner import Try, plan_capacity
from swarm.simulation.distant_hosts import num_processes
from swarm.simulation.report import Report
from swarm.simulation.scenario import Scenario, read_scenario
from swarm.simulation.simulation_run import simulate
from swarm_protocol.errors import ConfigError
from swarm_protocol.toml_text import parse_toml

from swarm_node.commands.command_options import Flags
from swarm_node.events.emitter import Emitter
from swarm_node.formatting import duration, plural
from swarm_node.settings.config import UsageError
from swarm_node.settings.parsers import whole_number
from swarm_node.storage.home import explained, read_text

MAX_FILE_BYTES = 16 * 2**20
"""A trace of 100,000 sessions has 3 MB."""

MAX_SEED = 2**31 - 1
MAX_PROCESSES = 16
"""More processes would have nothing to do: one process runs all trainers and servers."""


def run(flags: Flags) -> int:
    path: Path | None = flags.options["path"]
    if path is None:
        raise UsageError("PATH is missing", remedy="name the scenario file; docs/guides/simulate.md has an example")
    scenario = _load(path, flags.parsed("seed", whole_number(0, MAX_SEED), f"use 0 to {MAX_SEED}"))
    processes = flags.parsed("processes", whole_number(1, MAX_PROCESSES), f"use 1 to {MAX_PROCESSES}") or 0
    out: Path = flags.options["out"] or Path(f"{path.stem}-report")
    if out.name in ("", ".."):
        raise UsageError(f"--out: {str(out)!r} has no name for the report", remedy="give one, such as --out report")
    pages = out.with_name(f"{out.name}.html"), out.with_name(f"{out.name}.json")
    if not pages[0].parent.is_dir():
        raise ConfigError(
            f"there is no directory {pages[0].parent} to write the report to", remedy="choose another --out"
        )
    emitter, since = Emitter(json=flags.json), time.monotonic()
    minutes = scenario.warm_up_minutes + scenario.minutes

    def on_minute(minute: float, num_nodes: int) -> None:
        emitter.status(
            "simulation",
            f"simulated {minute:.0f} of {minutes:.0f} minutes (warm-up: {scenario.warm_up_minutes:.0f}) with "
            f"{plural(num_nodes, 'node')} in {duration(time.monotonic() - since)}",
        )

    def on_try(tried: Try) -> None:
        assert scenario.plan is not None
        verdict = f"are not enough, missed goals: {', '.join(tried.missed)}" if tried.missed else "are enough"
        emitter.status("plan", f"{plural(tried.num_nodes, 'node')} of the class {scenario.plan.vary} {verdict}")

    def run_one(scenario: Scenario) -> Report:
        number = num_processes(scenario, processes)
        line = f"simulating {plural(scenario.nodes, 'node')} in "
        line += "one process" if number == 1 else f"{number} processes"
        if number < processes:
            line += f": {processes} would wait for each other, because some nodes are less than 2 ms apart"
        emitter.say(line)
        return simulate(scenario, processes=number, on_minute=on_minute)

    report = run_one(scenario) if scenario.plan is None else plan_capacity(scenario, run_one, on_try)
    with explained("write", pages[0].parent, option="--out"):
        pages[0].write_text(report.to_html())
        pages[1].write_text(report.to_json())
    if flags.json:
        emitter.emit("simulation", html=str(pages[0]), json=str(pages[1]), sections=report.sections)
    else:
        emitter.result("\n".join((*report.lines(), f"report: {pages[0]} and {pages[1]}")))
    return 0


def _load(path: Path, seed: int | None) -> Scenario:
    """Read a scenario file. Raises ConfigError."""
    table = parse_toml(_read(path), path, remedy="docs/guides/simulate.md has an example")
    if not table:
        raise ConfigError(f"{path} is empty", remedy="docs/guides/simulate.md has an example")
    if seed is not None:
        table["seed"] = seed
    churn = table.get("churn")
    trace = churn.get("trace") if isinstance(churn, dict) else None
    return read_scenario(table, _read(path.parent / trace) if isinstance(trace, str) and trace else "")


def _read(path: Path) -> str:
    return read_text(path, MAX_FILE_BYTES, "name a scenario file that exists")
