"""`swarm-node evidence`: one line says what a file proves, offline, and the exit code says it to programs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.training_swarm import AUTHOR
from support.validated_runs import LIES, STATES, ChangedInner, run_with_liar
from support.wrong_reduction import IDENTITIES, RUN, reduced, times_minus_ten
from swarm.evidence_folder import EvidenceFolder
from swarm.testing import virtual_time
from swarm.training.evidence.wrong_interval import read_case
from swarm.training.inner import interval
from swarm.training.inner.interval import TrainingSetup
from swarm.training.inner.optimizers import NO_MOMENTS
from swarm.training.run.run_file import write_run
from swarm.training.run.signed_run import SignedRun, sign_mapping, to_mapping
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.checkpoint import Checkpoint, save_checkpoint
from swarm_node import cli
from swarm_protocol.proof_messages import Evidence, EvidenceFile, WrongInterval

LIAR = IDENTITIES[1].peer_id


def keep(home: Path, *, is_right: bool = False, name: str = LIAR) -> tuple[SignedRun, Path]:
    """Return a run, and the file with evidence of it in the home."""
    run = sign_mapping(RUN, to_mapping(RUN), AUTHOR, 1_750_000_000)
    case = reduced(run=run.run_id)
    result = case.result() if is_right else times_minus_ten(case.result())
    folder = home / "checkpoints" / run.run_id / "evidence"
    EvidenceFolder(folder, run.text, "test").keep(name, case.evidence(result).evidence().to_bytes())
    return run, folder / f"{name}.evidence"


def test_verify_says_in_one_line_who_lied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, path = keep(tmp_path)
    assert cli.run(["evidence", "verify", str(path)]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    reason = f"it signed a wrong result of part 1 of outer step 1 of {run.run_id}"
    assert line == f"{LIAR} lied: {reason}; it is banned for good ({path})"


def test_verify_as_an_event_says_who_lied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, path = keep(tmp_path)
    (tmp_path / "run.toml").write_text(run.text)
    assert cli.run(["evidence", "verify", str(path), "--run", str(tmp_path / "run.toml"), "--json"]) == 0
    (told,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (told["event"], told["peer_id"], told["kind"], told["until"]) == ("evidence", LIAR, "wrong_reduction", None)


def test_verify_of_evidence_that_proves_nothing_fails_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, path = keep(tmp_path, is_right=True)
    assert cli.run(["evidence", "verify", str(path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "proves nothing: evidence shows a result that is right" in line


@pytest.mark.parametrize("content", [None, b"", b"garbage", bytes(range(256)) * 40])
def test_verify_of_a_file_that_cannot_be_judged_is_wrong_usage(
    tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.evidence"
    if content is not None:
        path.write_bytes(content)
    assert cli.run(["evidence", "verify", str(path)]) == 2
    line, remedy = capsys.readouterr().err.splitlines()
    assert str(path) in line
    assert ("not an evidence file" in line) == (content is not None)
    assert "version" not in line
    assert "file" in remedy


def test_verify_of_an_unknown_kind_gives_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, path = keep(tmp_path)
    unknown = Evidence(kind="new_kind", body=b"of tomorrow").to_bytes()
    path.write_bytes(EvidenceFile(network_id="test", run=run.text.encode(), evidence=unknown).to_bytes())
    assert cli.run(["evidence", "verify", str(path)]) == 2
    assert "'new_kind', which this node does not know" in capsys.readouterr().err


def test_list_of_a_home_that_is_not_there_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["evidence", "list", "--home", str(tmp_path / "nothere")]) == 2
    assert f"there is no home at {tmp_path}/nothere" in capsys.readouterr().err


def test_verify_compares_the_evidence_with_the_given_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, path = keep(tmp_path)
    other = write_run(tmp_path / "other.toml", run.config, AUTHOR)
    assert cli.run(["evidence", "verify", str(path), "--run", str(tmp_path / "other.toml")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert run.run_id in line
    assert other.run_id in line


def test_verify_of_nothing_is_wrong_usage() -> None:
    assert cli.run(["evidence", "verify"]) == 2


def test_list_shows_all_evidence_of_a_home_and_names_what_proves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, path = keep(tmp_path)
    keep(tmp_path, is_right=True, name="another")
    assert cli.run(["evidence", "--home", str(tmp_path), "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["event"] for each in told] == ["evidence", "warning"]
    assert told[0]["path"] == str(path)


def test_list_of_a_home_without_evidence_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["evidence", "list", "--home", str(tmp_path)]) == 0
    assert "keeps no evidence" in capsys.readouterr().err


def test_verify_recomputes_an_interval_from_a_checkpoint_and_ignores_the_claimed_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    members, liar = virtual_time.run(run_with_liar(LIES["nothing trained"]))
    (ban,) = members[0].trainer.bans
    run, whole = members[0].trainer._run, WrongInterval.from_bytes(Evidence.from_bytes(ban.data).body)
    alone = replace(whole, findings=whole.findings[:1]).evidence().to_bytes()
    EvidenceFolder(tmp_path, run.text, "test").keep(liar.peer_id, alone)
    file = str(tmp_path / f"{liar.peer_id}.evidence")
    case = read_case(whole.to_bytes(), RunSignatures.of_run(run, AUTHOR, "test"), run.config)
    state = STATES[case.proof.origin.state_digest]
    place = save_checkpoint(tmp_path / "kept", Checkpoint(state=state, inner=NO_MOMENTS), keep=1)
    inners = [ChangedInner(), ChangedInner(change=LIES["nothing trained"])]
    monkeypatch.setattr(interval, "prepare", lambda *_, **__: TrainingSetup(inner=inners.pop(0), theta_N=state.theta_N))

    assert cli.run(["evidence", "verify", file]) == 1
    assert "findings of only 1 of 5 members" in capsys.readouterr().err
    assert cli.run(["evidence", "verify", file, "--state", str(place)]) == 0
    assert f"{liar.peer_id} lied: its contribution to outer step" in capsys.readouterr().err
    assert cli.run(["evidence", "verify", file, "--state", str(place)]) == 1
    assert "gives what the member sent" in capsys.readouterr().err
    assert cli.run(["evidence", "verify", file, "--state", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err
