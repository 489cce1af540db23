"""`swarm-node evidence verify` and `evidence list`: what a file of evidence proves, for anyone, without a network.

An evidence file holds the run's signed file, so its check needs nothing else.
"""

from __future__ import annotations

from pathlib import Path

from swarm_protocol.errors import IntegrityError, SwarmError

from swarm_node import diagnostics, interrupts
from swarm_node.commands.command_options import Flags
from swarm_node.events.emitter import Emitter
from swarm_node.settings.config import UsageError
from swarm_node.storage.home import EVIDENCE, Home


def verify(flags: Flags) -> int:
    """Print what the file proves. Raises ConfigError, or IntegrityError if it proves nothing."""
    path: Path | None = flags.options["path"]
    if path is None:
        raise UsageError("no evidence file is named", remedy="write swarm-node evidence verify FILE")
    _tell(path, flags.options["run"], Emitter(json=flags.json))
    return 0


def show(flags: Flags) -> int:
    """Print what each file of the home proves. What proves nothing is a warning."""
    from swarm.training.state.evidence_folder import files_in  # noqa: PLC0415

    home, emitter = Home(flags.home()), Emitter(json=flags.json)
    paths = [path for folder in sorted(home.checkpoints.glob(f"*/{EVIDENCE}")) for path in files_in(folder)]
    for path in paths:
        try:
            _tell(path, None, emitter)
        except SwarmError as error:
            emitter.emit("warning", message=error.message, remedy=error.remedy)
    if not paths:
        emitter.say(f"{home.path} keeps no evidence: nobody was convicted in its runs")
    return 0


def _tell(path: Path, run_file: Path | None, emitter: Emitter) -> None:
    from swarm.training.run.run_file import read_signed  # noqa: PLC0415 - torch, which takes seconds
    from swarm.training.state.bans import Bans, how_long  # noqa: PLC0415
    from swarm.training.state.evidence_folder import check_file  # noqa: PLC0415

    diagnostics.quieten_libraries()
    interrupts.raise_in_command()
    expected = read_signed(run_file) if run_file is not None else None
    run, verdict = check_file(path)
    if expected is not None and expected.run_id != run.run_id:
        raise IntegrityError(f"{path} is of the run {run.run_id}, and {run_file} is {expected.run_id}")
    until = Bans(run.config).add(verdict, b"").until
    emitter.emit(
        "evidence",
        path=str(path),
        run=run.run_id,
        peer_id=verdict.peer_id,
        kind=verdict.kind,
        step=verdict.step,
        reason=verdict.reason,
        until=until,
        how_long=how_long(until),
    )
