from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("grpc_tools", reason="grpcio-tools, of the dev extra, holds the compiler")

PROTOCOL = Path(__file__).parents[2] / "protocol"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copy the generator and one .proto, and compile it."""
    folder = tmp_path / "swarm_protocol" / "proto"
    folder.mkdir(parents=True)
    shutil.copy(PROTOCOL / "compile_protos.py", tmp_path)
    shutil.copy(PROTOCOL / "swarm_protocol" / "proto" / "hello.proto", folder)
    assert generate(tmp_path).returncode == 0
    return folder


def generate(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "compile_protos.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_generate_check_of_the_committed_code_passes() -> None:
    outcome = generate(PROTOCOL, "--check")
    assert outcome.returncode == 0, outcome.stderr


def test_generate_gives_the_committed_bytes_wherever_it_runs(copy: Path) -> None:
    committed = PROTOCOL / "swarm_protocol" / "proto"
    for name in ("hello_pb2.py", "hello_pb2.pyi"):
        assert (copy / name).read_bytes() == (committed / name).read_bytes()


def test_generate_check_names_stale_missing_and_left_over_files(copy: Path) -> None:
    root = copy.parents[1]
    (copy / "hello_pb2.py").write_text("stale")
    (copy / "hello_pb2.pyi").unlink()
    (copy / "gone_pb2.py").touch()
    outcome = generate(root, "--check")
    assert outcome.returncode == 1
    assert "gone_pb2.py, hello_pb2.py, hello_pb2.pyi; run `make proto`" in outcome.stderr
    assert generate(root).returncode == 0
    assert generate(root, "--check").returncode == 0
    assert sorted(path.name for path in copy.iterdir()) == ["hello.proto", "hello_pb2.py", "hello_pb2.pyi"]


def test_generated_modules_import_each_other_from_the_package(copy: Path) -> None:
    (copy / "talk.proto").write_text(
        'syntax = "proto3";\nimport "swarm_protocol/proto/hello.proto";\nmessage Talk { swarm.v1.Hello hello = 1; }\n'
    )
    assert generate(copy.parents[1]).returncode == 0
    assert "from swarm_protocol.proto import hello_pb2" in (copy / "talk_pb2.py").read_text()


def test_generate_with_an_unknown_argument_says_how_it_is_used(copy: Path) -> None:
    outcome = generate(copy.parents[1], "--chek")
    assert outcome.returncode == 2
    assert outcome.stderr == "usage: compile_protos.py [--check]\n"
