from __future__ import annotations

from dataclasses import replace
from importlib import metadata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol.decoders import HELLO, NEIGHBOUR
from swarm_protocol import limits
from swarm_protocol.errors import PeerRefused, PeerViolation
from swarm_protocol.version import PROTOCOL_VERSION, Hello, check_hello, software_version


@given(
    network_id=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
    protocol_version=st.integers(1, 2**31 - 1),
    sent_at=st.floats(0.0, limits.MAX_TIME_S),
)
def test_hello_round_trips(network_id: str, protocol_version: int, sent_at: float) -> None:
    hello = Hello(
        network_id=network_id, protocol_version=protocol_version, software_version=software_version(), sent_at=sent_at
    )
    assert Hello.from_bytes(hello.to_bytes()) == hello


def test_hello_at_every_bound_fits() -> None:
    hello = Hello(
        network_id="n" * limits.MAX_NETWORK_ID_BYTES,
        protocol_version=2**31 - 1,
        software_version="\U0001f600" * limits.MAX_VERSION_CHARS,
        sent_at=limits.MAX_TIME_S,
    )
    assert Hello.from_bytes(hello.to_bytes()) == hello


@pytest.mark.parametrize(
    "change",
    [
        {"network_id": ""},
        {"network_id": "n" * 65},
        {"protocol_version": 0},
        {"software_version": "a" * 33},
        {"sent_at": -1.0},
    ],
)
def test_hello_out_of_bounds_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"network id|protocol_version|software_version|sent_at"):
        replace(HELLO, **change)


def test_hello_from_noise_is_a_violation() -> None:
    with pytest.raises(PeerViolation, match="Hello has message version 71"):
        Hello.from_bytes(b"GET / HTTP/1.1\r\n\r\n")


def test_check_hello_of_a_compatible_peer_passes() -> None:
    check_hello(HELLO, HELLO, NEIGHBOUR)
    check_hello(HELLO, replace(HELLO, software_version="0.2.0"), NEIGHBOUR)
    check_hello(HELLO, replace(HELLO, sent_at=HELLO.sent_at + limits.MAX_CLOCK_SKEW_S), NEIGHBOUR)
    check_hello(HELLO, replace(HELLO, sent_at=0.0), NEIGHBOUR)


@pytest.mark.parametrize(
    ("change", "message", "remedy"),
    [
        ({"network_id": "other"}, "peer is in network 'other', and this node in 'swarm-main'", "same network id"),
        (
            {"protocol_version": PROTOCOL_VERSION + 1},
            f"peer speaks protocol {PROTOCOL_VERSION + 1}",
            "update this node",
        ),
        ({"sent_at": HELLO.sent_at + 3600.0}, "the clocks differ by 3600 s; the peer's is ahead", "set the clock"),
        ({"sent_at": HELLO.sent_at - 3600.0}, "the clocks differ by 3600 s; the peer's is behind", "set the clock"),
    ],
)
def test_check_hello_of_another_kind_of_peer_refuses_with_the_remedy(
    change: dict[str, object], message: str, remedy: str
) -> None:
    with pytest.raises(PeerRefused, match=message) as caught:
        check_hello(HELLO, replace(HELLO, **change), NEIGHBOUR)
    assert remedy in caught.value.remedy
    assert caught.value.peer_id == NEIGHBOUR
    assert caught.value.retry_after_s == 0.0


def test_check_hello_of_an_older_peer_says_who_must_update() -> None:
    with pytest.raises(PeerRefused, match="update the peer"):
        check_hello(replace(HELLO, protocol_version=PROTOCOL_VERSION + 1), HELLO, NEIGHBOUR)


def test_software_version_is_the_installed_distributions() -> None:
    assert software_version() == metadata.version("swarm-node")
