"""`swarm-node doctor`: every check in turn, each with its finding and what to do about it. Exit code 1 if one fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from swarm_node import interrupts, logs
from swarm_node.command_options import Flags
from swarm_node.config import Config
from swarm_node.doctor import Finding, local_checks
from swarm_node.doctor_network import check_network
from swarm_node.events import Emitter

_MARKS = {"ok": "✓", "warn": "!", "fail": "✗"}


def run(flags: Flags) -> int:
    config = flags.resolve()
    logs.quieten_libraries()
    logging.getLogger("swarm").setLevel(logging.CRITICAL)  # a finding says it better
    emitter = Emitter(json=flags.json)
    worst = 0
    for finding in _findings(config):
        worst = max(worst, int(finding.result == "fail"))
        _tell(emitter, finding)
    return worst


def _findings(config: Config) -> Iterable[Finding]:
    for check in local_checks():
        yield from check(config)
    interrupts.raise_in_command()
    yield from asyncio.run(check_network(config))


def _tell(emitter: Emitter, finding: Finding) -> None:
    if emitter.json:
        emitter.emit(
            "finding", check=finding.check, result=finding.result, message=finding.message, remedy=finding.remedy
        )
        return
    emitter.result(f"{_MARKS[finding.result]} {finding.check:<13} {finding.message}")
    if finding.remedy:
        emitter.result(f"  → {finding.remedy}")
