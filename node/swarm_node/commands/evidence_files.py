"""`swarm-node evidence verify` and `evidence list`: what a file of evidence proves, for anyone, without a network.

An evidence file holds the run's signed file, so its check needs nothing else. Those who do not believe what members
have signed about an interval compute it once more, from a checkpoint of the state that it began from and the run's
data. A file about a server's answer is judged by the model's files (`answer_evidence`), and one about its wrong proof
of possession proves itself (`possession_evidence`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from swarm_protocol.errors import IntegrityError, SwarmError
from swarm_protocol.proof_messages import EvidenceFile

from swarm_node import diagnostics, interrupts
from swarm_node.commands import answer_evidence, possession_evidence
from swarm_node.commands.command_options import Flags
from swarm_node.events.emitter import Emitter
from swarm_node.settings.config import UsageError
from swarm_node.storage import convicted_servers, served_evidence
from swarm_node.storage.home import EVIDENCE, Home

if TYPE_CHECKING:
    from swarm.training.evidence.bans import Verdict
    from swarm.training.run.signed_run import SignedRun

Check: TypeAlias = "Callable[[Path], tuple[SignedRun, Verdict]]"


def verify(flags: Flags) -> int:
    """Print what the file proves. Raises UsageError if it cannot be judged, IntegrityError if it proves nothing."""
    path: Path | None = flags.options["path"]
    if path is None:
        raise UsageError("no evidence file is named", remedy="write swarm-node evidence verify FILE")
    file = _usable(path)
    if possession_evidence.is_of(file):
        possession_evidence.judge(path, file, Emitter(json=flags.json))
        return 0
    if not file.run:
        answer_evidence.judge(path, file, flags.options["model"], Emitter(json=flags.json))
        return 0
    _tell(path, flags.options["run"], Emitter(json=flags.json), _replay(flags))
    return 0


def show(flags: Flags) -> int:
    """Print what each file of the home proves. What proves nothing is a warning. Raises UsageError if there is no such
    home."""
    from swarm.training.evidence.evidence_folder import files_in  # noqa: PLC0415

    home, emitter = Home(flags.home()), Emitter(json=flags.json)
    if not home.path.is_dir():
        raise UsageError(f"there is no home at {home.path}", remedy="name the home of a node with --home")
    paths = [path for folder in sorted(home.checkpoints.glob(f"*/{EVIDENCE}")) for path in files_in(folder)]
    for path in paths:
        try:
            _tell(path, None, emitter)
        except SwarmError as error:
            emitter.emit("warning", message=error.message, remedy=error.remedy)
    served = served_evidence.files_in(home.served_evidence)
    for path in served:
        try:
            answer_evidence.tell(path, _usable(path), emitter)
        except SwarmError as error:
            emitter.emit("warning", message=error.message, remedy=error.remedy)
    convicted = convicted_servers.files_in(home.convicted_servers)
    for path in convicted:
        try:
            possession_evidence.judge(path, _usable(path), emitter)
        except SwarmError as error:
            emitter.emit("warning", message=error.message, remedy=error.remedy)
    if not (paths or served or convicted):
        emitter.say(
            f"{home.path} keeps no evidence: no member of its runs and no server was convicted, and its spot checks "
            f"have named nobody"
        )
    return 0


def _usable(path: Path) -> EvidenceFile:
    """Return what is in the file. Raises UsageError for one that cannot be judged: it is not there, is no evidence, or
    of an unknown kind."""
    from swarm.training.evidence.evidence_folder import open_file, read_file  # noqa: PLC0415 - torch, for seconds

    try:
        file = read_file(path)
        if file.run:
            open_file(path)
        return file
    except SwarmError as error:
        raise UsageError(error.message, remedy=error.remedy) from error


def _replay(flags: Flags) -> Check | None:
    """Return what checks an accusation from the checkpoint that is given, if one is."""
    place: Path | None = flags.options["state"]
    if place is None:
        return None
    from swarm.training.data.local_data import LocalData  # noqa: PLC0415 - torch, which takes seconds
    from swarm.training.evidence.interval_replay import replay_file  # noqa: PLC0415
    from swarm.training.inner.interval import prepare  # noqa: PLC0415
    from swarm.training.state.checkpoint import load_at  # noqa: PLC0415

    config = flags.resolve()
    data = LocalData(path=config.data, tokenizer=config.tokenizer)
    state = load_at(place).state

    def check(path: Path) -> tuple[SignedRun, Verdict]:
        # the weights are those of the checkpoint, so nothing is brought
        return replay_file(path, state, lambda run: prepare(run.config, data=data, bring=lambda: state.theta_N).inner)

    return check


def _tell(path: Path, run_file: Path | None, emitter: Emitter, replay: Check | None = None) -> None:
    from swarm.training.evidence.bans import Bans, how_long  # noqa: PLC0415
    from swarm.training.evidence.evidence_folder import check_file  # noqa: PLC0415
    from swarm.training.run.run_file import read_signed  # noqa: PLC0415 - torch, which takes seconds

    diagnostics.quieten_libraries()
    interrupts.raise_in_command()
    expected = read_signed(run_file) if run_file is not None else None
    run, verdict = (replay or check_file)(path)
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
