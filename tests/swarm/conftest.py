from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from swarm.network import identity_check
from swarm.network.multiaddr import PeerAddr
from swarm.network.paths.dial_policy import DialPolicy


@pytest.fixture(autouse=True, scope="module")
def identities_are_free() -> Iterator[None]:
    """Let nodes join without the search for a copy of themselves, which starts a second daemon for each: those that
    all tests of a module share, too.

    Tests that ask for `copies_are_searched_for` have it.
    """

    async def is_free(
        _addrs: Sequence[PeerAddr], _peer_id: str, _network_id: str, _policy: DialPolicy, _invitation: object = None
    ) -> None:
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identity_check, "check_identity_is_free", is_free)
        yield


@pytest.fixture
def copies_are_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node that joins looks first whether another runs with its identity, as it does outside tests."""
    monkeypatch.setattr(identity_check, "check_identity_is_free", SEARCH)


SEARCH = identity_check.check_identity_is_free
