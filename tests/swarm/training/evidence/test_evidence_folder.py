"""Tests that evidence on disk outlives the process and can be checked from its file alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.training_swarm import AUTHOR
from support.wrong_reduction import IDENTITIES, RUN, reduced, times_minus_ten
from swarm.evidence_folder import EvidenceFolder, files_in
from swarm.training.evidence.evidence import check_file
from swarm.training.run.signed_run import SignedRun, sign_mapping, to_mapping
from swarm_protocol.errors import ConfigError, IntegrityError, PeerViolation
from swarm_protocol.proof_messages import EvidenceFile

LIAR = IDENTITIES[1].peer_id


def signed_run() -> SignedRun:
    return sign_mapping(RUN, to_mapping(RUN), AUTHOR, 1_750_000_000)


def evidence_of(run: SignedRun, *, is_right: bool = False) -> bytes:
    case = reduced(run=run.run_id)
    result = case.result()
    return case.evidence(result if is_right else times_minus_ten(result)).evidence().to_bytes()


def kept(folder: Path, *, is_right: bool = False) -> Path:
    run = signed_run()
    EvidenceFolder(folder, run.text, "test").keep(LIAR, evidence_of(run, is_right=is_right))
    (path,) = files_in(folder)
    return path


def test_evidence_is_kept_for_the_next_process_until_it_is_forgotten(tmp_path: Path) -> None:
    run = signed_run()
    folder = EvidenceFolder(tmp_path / "evidence", run.text, "test")
    assert folder.read() == []
    folder.keep(LIAR, b"first")
    folder.keep(LIAR, evidence_of(run))
    assert EvidenceFolder(tmp_path / "evidence", run.text, "test").read() == [evidence_of(run)]
    folder.forget(LIAR)
    folder.forget(LIAR)
    assert folder.read() == []


def test_file_proves_the_lie_without_anything_else(tmp_path: Path) -> None:
    run, verdict = check_file(kept(tmp_path))
    assert run == signed_run()
    assert (verdict.peer_id, verdict.step, verdict.kind) == (LIAR, 1, "wrong_reduction")


def test_file_is_refused_with_the_reason_when_it_proves_nothing(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match=r"proves nothing: evidence shows a result that is right"):
        check_file(kept(tmp_path, is_right=True))


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_damaged_file_proves_nothing(tmp_path: Path, damage: str) -> None:
    path = kept(tmp_path)
    data = path.read_bytes()
    path.write_bytes({"cut": data[:-9], "changed": data[:-9] + b"123456789", "empty": b""}[damage])
    with pytest.raises((IntegrityError, PeerViolation)):
        check_file(path)


def test_file_proves_nothing_for_another_run_or_network(tmp_path: Path) -> None:
    path = kept(tmp_path)
    file = EvidenceFile.from_bytes(path.read_bytes())
    other = sign_mapping(RUN, to_mapping(RUN), AUTHOR, 1_750_000_001)
    for run, network_id in ((other.text.encode(), "test"), (file.run, "elsewhere")):
        path.write_bytes(EvidenceFile(network_id=network_id, run=run, evidence=file.evidence).to_bytes())
        with pytest.raises(IntegrityError, match="proves nothing"):
            check_file(path)


def test_file_that_is_missing_or_too_large_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        check_file(tmp_path / "none.evidence")
    path = kept(tmp_path)
    monkeypatch.setattr(EvidenceFile, "MAX_BYTES", 100)
    with pytest.raises(IntegrityError, match="not an evidence file"):
        check_file(path)


def test_evidence_that_cannot_be_written_logs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "evidence").write_text("a file is in the way")
    folder = EvidenceFolder(tmp_path / "evidence", signed_run().text, "test")
    folder.keep(LIAR, b"evidence")
    assert folder.read() == []
    assert "does not outlive a restart" in caplog.text


def test_damaged_file_is_skipped_and_others_are_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept(tmp_path)
    (tmp_path / "0.evidence").write_bytes(b"nonsense")
    assert EvidenceFolder(tmp_path, signed_run().text, "test").read() == [evidence_of(signed_run())]
    assert "is not used" in caplog.text
