"""What a fuzzer does that is not guided by coverage: it breaks examples, counts what comes of them, and watches memory.

`protocol.fuzz_messages` says what is fuzzed.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
from support.wire_mutations import restructured
from swarm_protocol.errors import SwarmError
from swarm_protocol.wire import MESSAGE_VERSION

MAX_MESSAGE_BYTES = 4096
"""Longer examples are left to the tests of each decoder: a changed byte in a megabyte says little."""

MAX_GROWTH_BYTES = 64 * 2**20
"""Caches of checked signatures, names and records fill up; they hold far less."""

WARM_UP = 0.2
"""Share of the messages after which the process is not to grow any more."""

REPORT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`take` may raise a SwarmError, or one of `refusals`, for bytes that it does not accept. It gets broken
    `examples`; without any, random bytes, from which it draws what it does. It is fed in one of `every` turns."""

    name: str
    take: Callable[[bytes], Any]
    examples: Sequence[bytes] = ()
    refusals: tuple[type[Exception], ...] = ()
    every: int = 1


_VERSION = bytes([MESSAGE_VERSION])

MAX_TAKE_S = 1.0
"""Processor time for one message. The largest histories of a round take a tenth of it."""


def mutated(example: bytes, chance: random.Random) -> bytes:
    """Return the example with some fields broken, if it is a message of the protocol, or with a few bytes changed,
    left out, doubled or put in, or cut off."""
    if example[0:1] == _VERSION and chance.random() < 0.5 and (broken := restructured(example, chance)) is not None:
        return broken
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


def run(everything: Sequence[Target], num_messages: int, seed: int, report: Callable[[str], None]) -> Counter[str]:
    """Feed the targets in turn. Return how many messages each accepted and refused, and with which errors. Raises
    AssertionError."""
    chance, counts = random.Random(seed), Counter[str]()
    process, base_bytes, reported_at = psutil.Process(), 0, time.monotonic()
    for number in range(num_messages):
        turn, place = divmod(number, len(everything))
        target = everything[place]
        if turn % target.every:
            continue
        examples = [each for each in target.examples if len(each) <= MAX_MESSAGE_BYTES]
        data = mutated(chance.choice(examples), chance) if examples else chance.randbytes(8)
        began_s = time.thread_time()
        try:
            target.take(data)
            counts[f"{target.name} accepted"] += 1
        except (SwarmError, *target.refusals) as error:
            counts[f"{target.name} refused"] += 1
            counts[f"{target.name} raised {type(error).__name__}"] += 1
        except Exception as error:
            raise AssertionError(f"{target.name}: {error!r} for {data.hex()} (seed {seed}, {number})") from error
        took_s = time.thread_time() - began_s
        assert took_s < MAX_TAKE_S, f"{target.name}: {took_s:.1f} s for {data.hex()} (seed {seed}, {number})"
        if number == int(num_messages * WARM_UP):
            base_bytes = process.memory_info().rss
        if number % 1024 == 0 and time.monotonic() - reported_at > REPORT_S:
            reported_at = time.monotonic()
            report(f"{number:,} of {num_messages:,}, {process.memory_info().rss / 2**20:.0f} MiB")
    grown = process.memory_info().rss - base_bytes
    assert grown < MAX_GROWTH_BYTES, f"the process has grown by {grown / 2**20:.0f} MiB after the first fifth"
    report(f"{num_messages:,} messages over {len(everything)} targets; grown by {grown / 2**20:.1f} MiB")
    return counts
