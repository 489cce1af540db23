"""The libp2p daemon of hivemind's wheel, unpacked once for all tests.

The wheel has it packed: each start of it decompresses 28 MB first, which takes 0.12 s of the processor, and memory that
no two daemons share. Unpacked it is the same program, which starts within 0.02 s, and the suite starts some hundreds of
it. Started `swarm-node` programs run the packed one, as users do; so do benches.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from swarm.network.libp2p import p2pd_process

VARIABLE = "TESTS_UNPACKED_P2PD"
"""Names the unpacked file to the processes of the suite: pytest's workers, and forks that become nodes."""


def prepare(folder: Path) -> None:
    """Unpack it into `folder`, where no earlier run has, for all processes of the suite. Where it is not packed in the
    way that we know, as on other systems, they run it as it is."""
    packed = p2pd_process.p2pd_path().read_bytes()
    unpacked = folder / f"{zlib.crc32(packed):08x}" / "p2pd"
    if not unpacked.exists():
        from support.packed_program import NotPacked, unpack  # noqa: PLC0415 - compiles with numba

        try:
            program = unpack(packed)
        except NotPacked:
            return
        unpacked.parent.mkdir(exist_ok=True)
        partial = unpacked.with_name(f"p2pd-{os.getpid()}")  # several runs may begin at once
        partial.write_bytes(program)
        partial.chmod(0o755)
        partial.replace(unpacked)
    os.environ[VARIABLE] = str(unpacked)


def use() -> None:
    """Let hosts of this process run the unpacked daemon wherever they would run that of the wheel."""
    if VARIABLE not in os.environ:
        return
    unpacked, where = Path(os.environ[VARIABLE]), p2pd_process.p2pd_path
    packed = where()
    p2pd_process.p2pd_path = lambda: unpacked if (path := where()) == packed else path
