"""The networks of this machine."""

from __future__ import annotations

import psutil
from swarm.network.discovery.own_networks import source_addresses


def test_source_addresses_are_those_of_this_machine() -> None:
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    assert set(source_addresses()) <= own
