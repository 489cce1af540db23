"""Millions of broken messages over every decoder and parser of bytes from peers, with a count and a bound on memory.

`fuzz_decoders` is guided by coverage and slower; this one is fast and reaches what lies above the protocol.

    PYTHONPATH=tests python -m protocol.fuzz_messages 10000000 [SEED]

Prints a line a minute, and at the end how many messages each target accepted and refused. Exits with 1 and the
input, in hexadecimal, for an error that is not typed, or if the process has grown.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
from protocol.decoders import DECODERS
from protocol.private_examples import INVITATION, MEMBER, SECRET
from support.memory_lan import subnets
from swarm.network import framing
from swarm.network.discovery.mdns_messages import answer, query, read_message, service_of
from swarm.network.multiaddr import addr_bytes, addr_text, parse_peer_addr
from swarm.network.relay.circuit_messages import (
    CircuitStatus,
    check_hop_accepted,
    check_stop_accepted,
    hop_status,
    parse_hop_request,
    reserve_request,
    stop_request,
)
from swarm_protocol.errors import SwarmError
from swarm_protocol.network_invitation import parse_invitation
from swarm_protocol.network_secret import NetworkSecret

MAX_MESSAGE_BYTES = 4096
"""Longer examples are left to the tests of each decoder: a changed byte in a megabyte says little."""

MAX_GROWTH_BYTES = 64 * 2**20
"""Caches of checked signatures, names and records fill up; they hold far less."""

WARM_UP = 0.2
"""Share of the messages after which the process is not to grow any more."""

REPORT_S = 60.0

_ADDR = "/ip4/192.168.1.7/tcp/4001"
_SECRET = NetworkSecret(SECRET)
_SERVICE = service_of("private", _SECRET)
_HERE = subnets("192.168.1.5/24")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`take` may raise a SwarmError, or one of `refusals`, for bytes that it does not accept."""

    name: str
    take: Callable[[bytes], Any]
    examples: Sequence[bytes]
    refusals: tuple[type[Exception], ...] = ()


def targets() -> list[Target]:
    """Every decoder of the protocol, and the parsers of the network."""
    found = [Target(name=each.name, take=each.decode, examples=each.examples) for each in DECODERS]
    text = INVITATION.text().encode()
    raw_addr = addr_bytes(f"{_ADDR}/p2p/{MEMBER}")
    found += [
        Target(
            name="mDNS packet",
            take=lambda data: (read_message(data, _SERVICE, _HERE, _SECRET), read_message(data, _SERVICE, _HERE)),
            examples=(query(_SERVICE), answer(_SERVICE, MEMBER, [_ADDR], _SECRET), answer(_SERVICE, MEMBER, [_ADDR])),
        ),
        Target(name="hop request", take=parse_hop_request, examples=(reserve_request(),), refusals=(ValueError,)),
        Target(
            name="hop answer",
            take=check_hop_accepted,
            examples=tuple(map(hop_status, CircuitStatus)),
            refusals=(ValueError,),
        ),
        Target(name="stop answer", take=check_stop_accepted, examples=(stop_request(b"peer"),), refusals=(ValueError,)),
        Target(name="binary address", take=addr_text, examples=(raw_addr,), refusals=(ValueError,)),
        Target(
            name="address",
            take=lambda data: parse_peer_addr(data.decode("latin-1")),
            examples=(f"{_ADDR}/p2p/{MEMBER}".encode(),),
        ),
        Target(name="invitation", take=lambda data: parse_invitation(data.decode("latin-1")), examples=(text,)),
        Target(name="sealed", take=lambda data: _SECRET.open(data, b"x"), examples=(_SECRET.seal(b"content", b"x"),)),
        Target(
            name="frame header",
            take=lambda data: framing.parse_header(data[: framing.HEADER.size].ljust(framing.HEADER.size, b"\0")),
            examples=tuple(framing.frame(kind, b"body") for kind in framing.Kind),
        ),
    ]
    return [each for each in found if any(len(example) <= MAX_MESSAGE_BYTES for example in each.examples)]


def mutated(example: bytes, chance: random.Random) -> bytes:
    """Return the example with a few bytes changed, left out, doubled or put in, or cut off; or noise."""
    data = bytearray(example)
    for _ in range(chance.choice((1, 1, 1, 2, 4, 8))):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(6):
            case 0 if at < len(data):
                data[at] ^= 1 << chance.randrange(8)
            case 1 if at < len(data):
                data[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                data[at : at + chance.randrange(1, 9)] = b""
            case 3:
                data[at:at] = data[at : at + chance.randrange(1, 33)]
            case 4:
                data[at:at] = chance.randbytes(chance.randrange(1, 9))
            case _:
                del data[at:]
    return bytes(data[:MAX_MESSAGE_BYTES])


def run(num_messages: int, seed: int, report: Callable[[str], None]) -> Counter[str]:
    """Feed the targets in turn. Return how many messages each accepted and refused. Raises AssertionError."""
    chance, everything, counts = random.Random(seed), targets(), Counter[str]()
    process, base_bytes, reported_at = psutil.Process(), 0, time.monotonic()
    for number in range(num_messages):
        target = everything[number % len(everything)]
        data = mutated(chance.choice([each for each in target.examples if len(each) <= MAX_MESSAGE_BYTES]), chance)
        try:
            target.take(data)
            counts[f"{target.name} accepted"] += 1
        except (SwarmError, *target.refusals):
            counts[f"{target.name} refused"] += 1
        except Exception as error:
            raise AssertionError(f"{target.name}: {error!r} for {data.hex()} (seed {seed}, {number})") from error
        if number == int(num_messages * WARM_UP):
            base_bytes = process.memory_info().rss
        if number % 1024 == 0 and time.monotonic() - reported_at > REPORT_S:
            reported_at = time.monotonic()
            report(f"{number:,} of {num_messages:,}, {process.memory_info().rss / 2**20:.0f} MiB")
    grown = process.memory_info().rss - base_bytes
    assert grown < MAX_GROWTH_BYTES, f"the process has grown by {grown / 2**20:.0f} MiB after the first fifth"
    report(f"{num_messages:,} messages over {len(everything)} targets; grown by {grown / 2**20:.1f} MiB")
    return counts


def main(num_messages: str, seed: str = "1") -> None:
    for name, count in sorted(run(int(num_messages), int(seed), print).items()):
        print(f"{count:>12,}  {name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
