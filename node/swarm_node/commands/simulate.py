"""`swarm-node simulate`: simulates a network of thousands of nodes in virtual time and writes a report.

The scenario is a TOML file (see `swarm.simulation.scenario` and the guide). With a [plan] table the command simulates
several times, and finds out how many nodes of a class are enough. It writes the report to two files, as HTML for people
and as JSON for programs.
"""

from __future__ import annotations

import time
from pathlib import Path

from swarm.simulation.capacity_planner import Try, plan_capacity
from swarm.simulation.report import Report
from swarm.simulation.scenario import Scenario, read_scenario
from swarm.simulation.world import simulate
from swarm_protocol.errors import ConfigError
from swarm_protocol.toml_text import parse_toml

from swarm_node.commands.command_options import Flags
from swarm_node.events.emitter import Emitter
from swarm_node.formatting import duration, plural
from swarm_node.settings.config import UsageError
from swarm_node.settings.parsers import whole_number
from swarm_node.storage.home import explained, read_text

MAX_FILE_BYTES = 16 * 2**20
"""Maximum size of a scenario or a trace. A trace of 100,000 sessions, the maximum, has about 3 MB."""

MAX_SEED = 2**31 - 1


def run(flags: Flags) -> int:
    """Run the command. Raises UsageError and ConfigError."""
    path: Path = flags.needed("path", "name the scenario file; docs/guides/simulate.md has an example")
    scenario = _load(path, flags.parsed("seed", whole_number(0, MAX_SEED), f"use 0 to {MAX_SEED}"))
    out: Path = flags.options["out"] or Path(f"{path.stem}-report")
    if out.name in ("", ".."):
        raise UsageError(f"--out: {str(out)!r} has no name for the report", remedy="give one, such as --out report")
    html_path, json_path = out.with_name(f"{out.name}.html"), out.with_name(f"{out.name}.json")
    if not html_path.parent.is_dir():
        raise ConfigError(
            f"there is no directory {html_path.parent} to write the report to", remedy="choose another --out"
        )
    emitter, start_s = Emitter(json=flags.json), time.monotonic()
    minutes = scenario.warm_up_minutes + scenario.minutes

    def on_minute(minute: float, num_nodes: int) -> None:
        emitter.status(
            "simulation",
            f"simulated {minute:.0f} of {minutes:.0f} minutes (warm-up: {scenario.warm_up_minutes:.0f}) with "
            f"{plural(num_nodes, 'node')} in {duration(time.monotonic() - start_s)}",
        )

    def on_try(tried: Try) -> None:
        assert scenario.plan is not None
        verdict = f"are not enough, missed goals: {', '.join(tried.missed)}" if tried.missed else "are enough"
        emitter.status("plan", f"{plural(tried.num_nodes, 'node')} of the class {scenario.plan.vary} {verdict}")

    def run_one(scenario: Scenario) -> Report:
        emitter.say(f"simulating {plural(scenario.nodes, 'node')}")
        return simulate(scenario, on_minute=on_minute)

    report = run_one(scenario) if scenario.plan is None else plan_capacity(scenario, run_one, on_try)
    with explained("write", html_path.parent, option="--out"):
        html_path.write_text(report.to_html())
        json_path.write_text(report.to_json())
    if flags.json:
        emitter.emit("simulation", html=str(html_path), json=str(json_path), sections=report.sections)
    else:
        emitter.result("\n".join((*report.lines(), f"report: {html_path} and {json_path}")))
    return 0


def _load(path: Path, seed: int | None) -> Scenario:
    """Read a scenario file and its trace. `seed` replaces the seed in the file, unless it is None. Raises
    ConfigError."""
    table = parse_toml(_read(path), path, remedy="docs/guides/simulate.md has an example")
    if not table:
        raise ConfigError(f"{path} is empty", remedy="docs/guides/simulate.md has an example")
    if isinstance(table.get("nodes"), list):
        raise ConfigError(
            f"{path} lists nodes, as for swarm-node plan; in a scenario, nodes is their number",
            remedy=f"use swarm-node plan --nodes {path}, or write a scenario as in docs/guides/simulate.md",
        )
    if seed is not None:
        table["seed"] = seed
    churn = table.get("churn")
    trace = churn.get("trace") if isinstance(churn, dict) else None
    return read_scenario(table, _read(path.parent / trace) if isinstance(trace, str) and trace else "")


def _read(path: Path) -> str:
    return read_text(path, MAX_FILE_BYTES, "give an existing text file of at most 16 MiB")
