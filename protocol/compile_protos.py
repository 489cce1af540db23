"""Generate the Python code of every .proto in `swarm_protocol/proto`, or check that what is committed is that code.

    python protocol/compile_protos.py            # make proto
    python protocol/compile_protos.py --check    # part of make check

Needs the `dev` extra (grpcio-tools). The same versions give the same bytes, so `--check` compares bytes; the versions
are those of constraints.txt.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
FOLDER = Path("swarm_protocol", "proto")


def sources() -> list[str]:
    """Return paths relative to ROOT, so that generated imports read `from swarm_protocol.proto import x_pb2`.

    The path is also the file's name in protobuf's process-wide pool, where another library may hold a `dht.proto`.
    """
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / FOLDER).glob("*.proto"))


def compile_into(target: Path) -> None:
    """Run protoc, a command of our own making, writing `swarm_protocol/proto/*_pb2.py` and `.pyi` under `target`."""
    command = [sys.executable, "-m", "grpc_tools.protoc", "--proto_path=.", f"--python_out={target}"]
    subprocess.run([*command, f"--pyi_out={target}", *sources()], cwd=ROOT, check=True)  # noqa: S603


def generated(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((root / FOLDER).glob("*_pb2.py*"))}


def differences() -> dict[str, bytes | None]:
    """Return generated files that are missing or stale with their right contents; None for one whose .proto is gone."""
    with tempfile.TemporaryDirectory() as folder:
        compile_into(Path(folder))
        fresh = generated(Path(folder))
    committed = generated(ROOT)
    names = sorted(fresh.keys() | committed.keys())
    return {name: fresh.get(name) for name in names if fresh.get(name) != committed.get(name)}


def update(path: Path, content: bytes | None) -> None:
    """Replace the file in one step, so that a concurrent import finds the old file or the new one."""
    if content is None:
        path.unlink()
        return
    temporary = path.with_suffix(".new")
    temporary.write_bytes(content)
    temporary.replace(path)


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print("usage: compile_protos.py [--check]", file=sys.stderr)  # noqa: T201
        return 2
    stale = differences()
    if not arguments:
        for name, content in stale.items():
            update(ROOT / FOLDER / name, content)
        return 0
    if stale:
        print(f"not what the .proto files say: {', '.join(stale)}; run `make proto`", file=sys.stderr)  # noqa: T201
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
