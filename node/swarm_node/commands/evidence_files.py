"""`swarm-node evidence verify` and `evidence list`: what an evidence file proves, without a network.

An evidence file contains the run's signed file, so checking it needs nothing else. To check an interval without
trusting the members' findings, one recomputes it from a checkpoint of its start and the run's data. Evidence about a
server's answer is checked with the model's files. Evidence about a wrong proof of possession proves itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from swarm.evidence_folder import files_in, proving, read_file
from swarm.serving.checking.span_commitment import signed_by
from swarm.serving.manifest.possession import check_possession, read_possession
from swarm_protocol.errors import ConfigError, IntegrityError, PeerViolation, SwarmError
from swarm_protocol.proof_messages import WRONG_ANSWER, WRONG_POSSESSION, Evidence, EvidenceFile
from swarm_protocol.served_evidence_messages import AnswerCommitment, ServedEvidence

from swarm_node import diagnostics
from swarm_node.commands.command_options import Flags
from swarm_node.events.emitter import Emitter
from swarm_node.formatting import day
from swarm_node.settings.config import UsageError
from swarm_node.storage.home import EVIDENCE, Home
from swarm_node.storage.server_evidence import answers_in, files_of_networks

if TYPE_CHECKING:
    from swarm.training.evidence.bans import Verdict
    from swarm.training.run.signed_run import SignedRun

Check: TypeAlias = "Callable[[Path], tuple[SignedRun, Verdict]]"


def verify(flags: Flags) -> int:
    """Print what the file proves. Raises UsageError if it cannot be checked, IntegrityError if it proves nothing."""
    path: Path | None = flags.options["path"]
    if path is None:
        raise UsageError("no evidence file is named", remedy="write swarm-node evidence verify FILE")
    _print(path, Emitter(json=flags.json), flags)
    return 0


def show(flags: Flags) -> int:
    """Print what each evidence file in the home proves, and warn of each that proves nothing.

    Raises UsageError if there is no such home.
    """
    home, emitter = Home(flags.home()), Emitter(json=flags.json)
    if not home.path.is_dir():
        raise UsageError(f"there is no home at {home.path}", remedy="name the home of a node with --home")
    of_runs = [path for folder in sorted(home.checkpoints.glob(f"*/{EVIDENCE}")) for path in files_in(folder)]
    paths = [*of_runs, *answers_in(home.served_evidence), *files_of_networks(home.convicted_servers)]
    for path in paths:
        try:
            _print(path, emitter)
        except SwarmError as error:
            emitter.warning(error.message, remedy=error.remedy)
    if not paths:
        emitter.say(
            f"{home.path} keeps no evidence: no member of its runs and no server was convicted, and its spot checks "
            f"found no lying server"
        )
    return 0


def _print(path: Path, emitter: Emitter, flags: Flags | None = None) -> None:
    """Print what the file proves, as far as it proves it by itself, or with what the `flags` of `verify` name."""
    file = _usable(path)
    if _is_of_possession(file):
        _judge_possession(path, file, emitter)
    elif file.run:
        _tell(path, flags.options["run"] if flags else None, emitter, _replay(flags) if flags else None)
    elif flags:
        _judge_answer(path, file, flags.options["model"], emitter)
    else:
        _tell_answer(path, file, emitter)


def _usable(path: Path) -> EvidenceFile:
    """Return what is in the file. Raises UsageError if it is missing, is not evidence or is of an unknown kind."""
    try:
        file = read_file(path)
        if file.run:
            from swarm.training.evidence.evidence import open_file  # noqa: PLC0415 - torch, for seconds

            open_file(path)
        return file
    except SwarmError as error:
        raise UsageError(error.message, remedy=error.remedy) from error


def _replay(flags: Flags) -> Check | None:
    """Return a check of an accusation from the checkpoint that was given, or None if none was given."""
    place: Path | None = flags.options["state"]
    if place is None:
        return None
    from swarm.training.data.local_data import LocalData  # noqa: PLC0415 - torch, which takes seconds
    from swarm.training.evidence.interval_audits import replay_file  # noqa: PLC0415
    from swarm.training.inner.interval import prepare  # noqa: PLC0415
    from swarm.training.state.checkpoint import load_at  # noqa: PLC0415

    config = flags.resolve()
    data = LocalData(path=config.data, tokenizer=config.tokenizer)
    state = load_at(place).state

    def check(path: Path) -> tuple[SignedRun, Verdict]:
        # the checkpoint has the weights, so no start checkpoint is loaded
        return replay_file(path, state, lambda run: prepare(run.config, data=data, bring=lambda: state.theta_N).inner)

    return check


def _tell(path: Path, run_file: Path | None, emitter: Emitter, replay: Check | None = None) -> None:
    from swarm.training.evidence.bans import Bans, how_long  # noqa: PLC0415
    from swarm.training.evidence.evidence import check_file  # noqa: PLC0415
    from swarm.training.run.run_file import load_signed_run  # noqa: PLC0415 - torch, which takes seconds

    diagnostics.begin_work()
    expected = load_signed_run(run_file) if run_file is not None else None
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


def _is_of_possession(file: EvidenceFile) -> bool:
    """Return whether the file is about a wrong proof of possession."""
    try:
        return not file.run and Evidence.from_bytes(file.evidence).kind == WRONG_POSSESSION
    except SwarmError:
        return False


def _judge_possession(path: Path, file: EvidenceFile, emitter: Emitter) -> None:
    """Print what the file proves, offline. Raises IntegrityError if it proves nothing."""
    with proving(path):
        verdict = check_possession(read_possession(file.evidence), file.network_id)
    emitter.emit(
        "convicted_server",
        path=str(path),
        peer_id=verdict.peer_id,
        model=verdict.model,
        reason=verdict.reason,
        until=verdict.until,
        until_day=day(verdict.until),
    )


def _judge_answer(path: Path, file: EvidenceFile, model: Path | None, emitter: Emitter) -> None:
    """Print what the file about a server's answer proves, using the published model in the directory `model`.

    Raises UsageError if the file cannot be checked, because the model is missing or another one. Raises IntegrityError
    if the file proves nothing.
    """
    evidence = _served(path, file)
    with proving(path):
        peer_id, stated = signed_by(evidence.commitment, file.network_id)
    if model is None:
        raise UsageError(
            f"{path} is about an answer of {peer_id} with {stated.model}, which only the model's files can check",
            remedy="add --model DIR: the directory of the published model",
        )
    from swarm.serving.server.answer_replay import replay_answer  # noqa: PLC0415 - torch, which takes seconds

    diagnostics.begin_work()
    try:
        verdict = replay_answer(evidence, file.network_id, model)
    except PeerViolation as error:
        raise IntegrityError(f"{path} proves nothing: {error.message}") from error
    except (ConfigError, IntegrityError) as error:
        raise UsageError(error.message, remedy=error.remedy) from error
    _emit_answer(path, verdict.peer_id, stated, f"lied: {verdict.reason}", emitter, is_proven=True)


def _tell_answer(path: Path, file: EvidenceFile, emitter: Emitter) -> None:
    """Print what the file is about, unchecked. Raises UsageError or IntegrityError if it is not about an answer."""
    with proving(path):
        peer_id, stated = signed_by(_served(path, file).commitment, file.network_id)
    reason = "was found wrong by this node's spot checks; evidence verify --model DIR checks the file"
    _emit_answer(path, peer_id, stated, reason, emitter, is_proven=False)


def _emit_answer(
    path: Path, peer_id: str, stated: AnswerCommitment, reason: str, emitter: Emitter, *, is_proven: bool
) -> None:
    about = {"peer_id": peer_id, "model": stated.model, "start": stated.start, "end": stated.end}
    emitter.emit("served_evidence", path=str(path), **about, is_proven=is_proven, reason=reason)


def _served(path: Path, file: EvidenceFile) -> ServedEvidence:
    try:
        evidence = Evidence.from_bytes(file.evidence)
        if evidence.kind != WRONG_ANSWER:
            raise UsageError(
                f"{path} holds evidence of the kind {evidence.kind!r} without a run",
                remedy="check it with a newer swarm-node, or get the file again",
            )
        return ServedEvidence.from_bytes(evidence.body)
    except PeerViolation as error:
        raise UsageError(f"{path} holds no evidence: {error.message}", remedy="get the file again") from error
