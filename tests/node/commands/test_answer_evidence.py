"""`swarm-node evidence` about servers: the finder keeps it, it is listed without a verdict, and the model's files judge
it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from support.published_models import published_copy
from support.tiny_models import FAMILIES, write_model
from swarm.serving.model.model_files import open_model
from swarm.serving.model.span_loading import load_span
from swarm_node import cli
from swarm_node.storage import server_evidence
from swarm_protocol import limits
from swarm_protocol.envelope import seal_now
from swarm_protocol.identity import Identity
from swarm_protocol.proof_messages import Evidence, EvidenceFile
from swarm_protocol.rows import TOKENS, row_bytes
from swarm_protocol.served_evidence_messages import (
    COMMITMENT_PURPOSE,
    AnswerCommitment,
    PositionDigests,
    ServedEvidence,
)

SERVER = Identity(b"s" * 32)
TOKENS_T = np.arange(1, 13, dtype="<i4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    published_copy(write_model(root / "bare", FAMILIES["llama"](), 0), root / "tiny")
    return root / "tiny"


def signed(model: Path, *, factor: float) -> bytes:
    """Return the evidence of a server that gave `factor` times the right outputs of the first two blocks."""
    import torch  # noqa: PLC0415

    files = open_model(model)
    span = load_span(files, 0, 2)
    with torch.inference_mode():
        rows_TH = factor * span.forward(torch.from_numpy(TOKENS_T.astype(np.int64))[None], 0, 2)[0]
    outputs = rows_TH.numpy().astype("<f4").tobytes()
    took, gave = PositionDigests(), PositionDigests()
    took.add_rows(0, TOKENS_T.tobytes(), row_bytes(TOKENS, 0))
    gave.add_rows(0, outputs, row_bytes("raw", files.hidden_size))
    stated = AnswerCommitment(
        client_peer_id=Identity(b"c" * 32).peer_id,
        sequence_id=bytes(16),
        model="tiny",
        revision=files.revision("float32"),
        start=0,
        end=2,
        inputs_from=0,
        inputs_to=12,
        inputs_digest=took.digest(12),
        outputs_from=0,
        outputs_to=12,
        outputs_digest=gave.digest(12),
    )
    commitment = seal_now(
        SERVER,
        "test",
        purpose=COMMITMENT_PURPOSE,
        subject="tiny",
        payload=stated.to_bytes(),
        now=1_700_000_000.0,
        lifetime_s=60.0,
    )
    return ServedEvidence(commitment=commitment, codec="raw", inputs=TOKENS_T.tobytes(), outputs=outputs).to_bytes()


def kept(home: Path, evidence: bytes) -> Path:
    server_evidence.keep_answer(home / "served-evidence", SERVER.peer_id, "test", evidence)
    (path,) = server_evidence.answers_in(home / "served-evidence")
    return path


def test_wrong_answer_is_listed_unjudged_and_proved_by_the_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = kept(tmp_path, signed(model, factor=1.01))
    assert path.stat().st_mode & 0o077 == 0, "it contains a client's request"
    assert cli.run(["evidence", "list", "--home", str(tmp_path), "--json"]) == 0
    assert cli.run(["evidence", "verify", str(path), "--model", str(model), "--json"]) == 0
    listed, proved = map(json.loads, capsys.readouterr().out.splitlines())
    assert listed["event"] == proved["event"] == "served_evidence"
    assert (listed["is_proven"], proved["is_proven"]) == (False, True)
    assert {each["peer_id"] for each in (listed, proved)} == {SERVER.peer_id}
    assert "times the tolerance" in proved["reason"]


def test_right_answer_proves_nothing(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = kept(tmp_path, signed(model, factor=1.0))
    assert cli.run(["evidence", "verify", str(path), "--model", str(model)]) == 1
    assert "proves nothing: evidence shows outputs that an honest server may give" in capsys.readouterr().err


def test_answer_is_not_judged_without_its_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = kept(tmp_path, signed(model, factor=1.01))
    assert cli.run(["evidence", "verify", str(path)]) == 2
    assert "add --model DIR" in capsys.readouterr().err
    published_copy(write_model(tmp_path / "bare", FAMILIES["llama"](), 5), tmp_path / "other")
    for place, why in ((tmp_path / "other", "is another model"), (tmp_path / "bare", "no signed manifest")):
        assert cli.run(["evidence", "verify", str(path), "--model", str(place)]) == 2
        assert why in capsys.readouterr().err


def test_answer_without_a_signature_proves_nothing(model: Path, tmp_path: Path) -> None:
    genuine = ServedEvidence.from_bytes(signed(model, factor=1.01))
    forged = ServedEvidence(commitment=genuine.commitment[:-1] + b"x", codec="raw", inputs=genuine.inputs)
    path = kept(tmp_path, forged.to_bytes())
    assert cli.run(["evidence", "verify", str(path), "--model", str(model)]) == 1
    unknown = Evidence(kind="new_kind", body=b"of tomorrow").to_bytes()
    path.write_bytes(EvidenceFile(network_id="test", run=b"", evidence=unknown).to_bytes())
    assert cli.run(["evidence", "verify", str(path), "--model", str(model)]) == 2


def test_home_keeps_the_newest_evidence_within_its_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_evidence, "MAX_ANSWERS", 3)
    evidence = ServedEvidence(commitment=b"signed", codec="raw", inputs=b"rows").to_bytes()
    for number in range(5):
        server_evidence.keep_answer(tmp_path, f"peer{number}", "test", evidence)
        os.utime(tmp_path / f"peer{number}.evidence", ns=(number, number))
    assert [path.stem for path in server_evidence.answers_in(tmp_path)] == ["peer2", "peer3", "peer4"]
    monkeypatch.setattr(limits, "MAX_SERVER_BANS", 1)  # evidence of another folder
    assert len(server_evidence.answers_in(tmp_path)) == 3
    size = (tmp_path / "peer4.evidence").stat().st_size
    monkeypatch.setattr(server_evidence, "MAX_ANSWER_BYTES", 2 * size)
    server_evidence.keep_answer(tmp_path, "peer4", "test", evidence)
    assert [path.stem for path in server_evidence.answers_in(tmp_path)] == ["peer3", "peer4"]
