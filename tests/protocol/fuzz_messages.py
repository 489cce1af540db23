"""Millions of broken messages over every decoder and parser of bytes from peers, with a count and a bound on memory.

`fuzz_decoders` is guided by coverage and slower; this one is fast and reaches what lies above the protocol. The command
also runs what takes decoded messages: histories of a round, of both sides of a session and of a stream
(`support.fuzzed_rounds`, `support.fuzzed_sessions`, `support.fuzzed_streams`), of some forty or sixty events each, and
proofs that a liar has signed (`support.fuzzed_proofs`). `tests/swarm/test_fuzz_machines.py` has a short run of these.

    PYTHONPATH=tests python -m protocol.fuzz_messages 10000000 [SEED]

Prints a line a minute, and at the end how many messages each target accepted and refused, and with which errors. Exits
with 1 and the input, in hexadecimal, for an error that is not typed, or if the process has grown.
"""

from __future__ import annotations

import sys

from protocol.decoders import DECODERS
from protocol.private_examples import INVITATION, MEMBER, SECRET
from support import fuzzed_streams
from support.fuzzing import MAX_MESSAGE_BYTES, Target, run
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
from swarm_protocol.network_invitation import NetworkSecret, parse_invitation

_ADDR = "/ip4/192.168.1.7/tcp/4001"
_SECRET = NetworkSecret(SECRET)
_SERVICE = service_of("private", _SECRET)
_HERE = subnets("192.168.1.5/24")


def targets() -> list[Target]:
    """Return every decoder of the protocol, and the parsers of the network."""
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


def main(num_messages: str, seed: str = "1") -> None:
    from support import fuzzed_proofs, fuzzed_rounds, fuzzed_sessions, fuzzed_tokenizers  # noqa: PLC0415 - torch, which takes seconds

    everything = [*targets(), *fuzzed_rounds.TARGETS, *fuzzed_sessions.TARGETS, *fuzzed_proofs.TARGETS]
    everything += [*fuzzed_tokenizers.TARGETS, *fuzzed_streams.TARGETS]
    for name, count in sorted(run(everything, int(num_messages), int(seed), print).items()):
        print(f"{count:>12,}  {name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
