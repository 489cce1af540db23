"""The unpacked daemon that tests run equals the wheel's packed daemon once that is in memory."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from support import packed_program, unpacked_daemon
from support.packed_program import LOADED, SEGMENT, NotPacked, unpack
from swarm.network.libp2p import p2pd_process
from swarm.network.libp2p.p2pd_process import Daemon, DaemonOptions

WRITABLE = 2


@pytest.mark.skipif(
    sys.platform != "linux" or unpacked_daemon.VARIABLE not in os.environ, reason="tests run the daemon of the wheel"
)
def test_unpacked_daemon_has_the_segments_of_the_running_packed_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unpacked = p2pd_process.p2pd_path()
    assert unpacked == Path(os.environ[unpacked_daemon.VARIABLE])
    program = unpacked.read_bytes()
    headers = [SEGMENT.unpack_from(program, 64 + index * SEGMENT.size) for index in range(program[56])]
    compared = []

    async def main() -> None:
        # the daemon would change the writable segments
        monkeypatch.setattr(p2pd_process, "p2pd_path", daemon_of_the_wheel)
        daemon = await Daemon.start(DaemonOptions())
        with Path(f"/proc/{daemon.pid}/mem").open("rb") as memory:
            for kind, flags, offset, address, _, num_bytes, *_ in headers:
                if kind == LOADED and not flags & WRITABLE:
                    memory.seek(address)
                    compared.append(memory.read(num_bytes) == program[offset : offset + num_bytes])
        await daemon.stop()

    asyncio.run(main())
    assert compared == [True, True]


def daemon_of_the_wheel() -> Path:
    package = importlib.util.find_spec("hivemind")
    assert package is not None
    assert package.submodule_search_locations is not None
    return Path(package.submodule_search_locations[0], "hivemind_cli", "p2pd")


def test_program_is_unchanged_when_it_is_packed_in_another_format() -> None:
    packed = daemon_of_the_wheel().read_bytes()
    for other in (b"#!/bin/sh\n", b"\xcf\xfa\xed\xfe" + bytes(100), Path(sys.executable).read_bytes()[:4096]):
        with pytest.raises(NotPacked):
            unpack(other)
    method = packed.index(b"UPX!") + 28
    with pytest.raises(NotPacked):
        unpack(packed[:method] + b"\x0e" + packed[method + 1 :])


@pytest.mark.parametrize("found", [[(0, 0)], IndexError()], ids=["other sizes", "ends too soon"])
def test_program_is_unchanged_when_its_packed_blocks_are_inconsistent(found: Any) -> None:
    with patch.object(packed_program, "_decompress", Mock(side_effect=found)), pytest.raises(NotPacked):
        unpack(daemon_of_the_wheel().read_bytes())
