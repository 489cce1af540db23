"""Decoders raise only their two typed errors for any bytes, and each accepted message has one meaning."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import random

import pytest
import swarm_protocol
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol.decoders import DECODERS, Decoder, name_of
from swarm_protocol.errors import IntegrityError, PeerViolation

EVERY_DECODER = pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.name)


def decode_or_refuse(decoder: Decoder, data: bytes) -> None:
    """Check that decoding gives a typed refusal, or a value that survives another round trip."""
    try:
        value = decoder.decode(data)
    except (PeerViolation, IntegrityError):
        return
    if decoder.encode is not None:
        assert decoder.decode(decoder.encode(value)) == value


def mutated(examples: tuple[bytes, ...], draw: random.Random) -> bytes:
    """Return an example with bytes flipped, cut out, truncated, repeated or added."""
    data = bytearray(draw.choice(examples))
    for _ in range(draw.randint(1, 4)):
        start = draw.randint(0, len(data))
        end = draw.randint(start, min(len(data), start + 8))
        match draw.choice(["flip", "cut", "truncate", "insert", "repeat"]):
            case "flip" if start < len(data):
                data[start] ^= draw.randint(1, 255)
            case "cut":
                del data[start:end]
            case "truncate":
                del data[start:]
            case "insert":
                data[start:start] = draw.randbytes(draw.randint(0, 8))
            case _:
                data[start:start] = data[start:end]
    return bytes(data)


def test_decoders_of_their_examples_round_trip() -> None:
    for decoder in DECODERS:
        for example in decoder.examples:
            value = decoder.decode(example)
            assert decoder.encode is None or decoder.encode(value) == example, decoder.name


@EVERY_DECODER
@given(seed=st.integers(0, 2**32))  # a draw for each byte would take longer than all decoding
def test_decoder_of_mutated_bytes_refuses_or_accepts(decoder: Decoder, seed: int) -> None:
    decode_or_refuse(decoder, mutated(decoder.examples, random.Random(seed)))


@EVERY_DECODER
@settings(max_examples=30)  # random bytes are refused early; the fuzzer tries thousands a second
@given(data=st.binary(max_size=512))
def test_decoder_of_random_bytes_refuses_or_accepts(decoder: Decoder, data: bytes) -> None:
    decode_or_refuse(decoder, data)
    decode_or_refuse(decoder, decoder.examples[0][:1] + data)


@EVERY_DECODER
def test_decoder_of_every_truncation_and_changed_byte_refuses_or_accepts(decoder: Decoder) -> None:
    """A flip of the lowest bit changes a value, of the middle one a field's number, and of the highest one a length."""
    example = decoder.examples[0]
    for position in range(len(example)):
        decode_or_refuse(decoder, example[:position])
        for bit in (0, 3, 7):
            flipped = bytearray(example)
            flipped[position] ^= 1 << bit
            decode_or_refuse(decoder, bytes(flipped))


def test_decoders_of_another_message_version_refuse_by_name() -> None:
    for decoder in DECODERS:
        for version in (0, 2, 255):
            with pytest.raises(PeerViolation, match=f"version {version}"):
                decoder.decode(bytes([version]) + decoder.examples[0][1:])


def test_decoders_of_too_many_bytes_refuse_before_parsing() -> None:
    too_many = bytes(100 * 2**20)
    for decoder in DECODERS:
        with pytest.raises(PeerViolation, match="more than"):
            decoder.decode(too_many)


def test_registry_lists_every_class_that_reads_bytes() -> None:
    modules = [
        importlib.import_module(f"swarm_protocol.{found.name}")
        for found in pkgutil.iter_modules(swarm_protocol.__path__)
    ]
    readers = {
        name_of(value)
        for module in modules
        for _, value in inspect.getmembers(module, inspect.isclass)
        if value.__module__ == module.__name__ and hasattr(value, "from_bytes")
    }
    readers.remove("wire.WireMessage")  # the base class
    missing = readers - {decoder.name for decoder in DECODERS}
    assert not missing, f"give these examples in tests/protocol: {sorted(missing)}"
