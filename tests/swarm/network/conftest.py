from __future__ import annotations

from collections.abc import Sequence

import pytest
from swarm.network import network_entry
from swarm.network.multiaddr import PeerAddr
from swarm.network.paths.dial_policy import DialPolicy


@pytest.fixture
def identities_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Join without the search for a copy of oneself: half of the processes for tests that start many hosts."""

    async def is_free(
        _addrs: Sequence[PeerAddr], _peer_id: str, _network_id: str, _policy: DialPolicy, _invitation: object = None
    ) -> None:
        return None

    monkeypatch.setattr(network_entry, "check_identity_is_free", is_free)
