"""A running node compares its protocol version with those of its connected peers."""

from __future__ import annotations

import dataclasses

from swarm.network.libp2p.greeting import hello_of
from swarm.network.version_watch import VersionWatch
from swarm_protocol.version import PROTOCOL_VERSION

SAME = hello_of("swarm")
NEWER = dataclasses.replace(SAME, protocol_version=PROTOCOL_VERSION + 1)
OLDER = dataclasses.replace(SAME, protocol_version=PROTOCOL_VERSION - 1)


def test_other_versions_are_reported_once_each_way() -> None:
    watch = VersionWatch()
    assert watch.look([]) is None
    assert watch.look([SAME]) is None
    assert watch.look([OLDER]) == OLDER
    assert watch.look([OLDER]) is None
    assert watch.look([OLDER, NEWER, SAME]) == NEWER
    assert watch.look([NEWER]) is None


def test_other_version_of_a_minority_is_not_reported() -> None:
    watch = VersionWatch()
    assert watch.look([NEWER, SAME, SAME]) is None
    assert watch.look([NEWER, SAME]) == NEWER
