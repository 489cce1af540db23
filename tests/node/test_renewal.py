"""A node whose machine wakes up says that it is there before its next record is due."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from swarm.network.suspension import SUSPENDED_S
from swarm.testing import virtual_time
from swarm_node import daemon


def test_records_are_renewed_once_after_each_suspension(monkeypatch: pytest.MonkeyPatch) -> None:
    renewed_s: list[float] = []
    slept_s = 0.0

    async def main() -> None:
        nonlocal slept_s
        now = asyncio.get_running_loop().time
        watch = daemon.SuspensionWatch
        monkeypatch.setattr(daemon, "SuspensionWatch", lambda: watch(lambda: now() + slept_s, now))
        membership = SimpleNamespace(renew=lambda: renewed_s.append(now()))
        renewing = asyncio.create_task(daemon._keep_renewed(cast("Any", SimpleNamespace(membership=membership))))
        await asyncio.sleep(3600)
        assert not renewed_s
        woken_s = []
        for _ in range(2):
            slept_s += 2 * SUSPENDED_S
            woken_s.append(now())
            await asyncio.sleep(60)
        assert len(renewed_s) == 2
        assert all(at - woken <= daemon.AWAKE_S for at, woken in zip(renewed_s, woken_s, strict=True))
        renewing.cancel()
        await asyncio.wait((renewing,))

    virtual_time.run(main())
