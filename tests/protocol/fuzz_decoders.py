"""Coverage-guided fuzzing of every decoder, in a process of its own because libFuzzer ends the one that it runs in.

    PYTHONPATH=tests python -m protocol.fuzz_decoders SECONDS FOLDER [--plant]

FOLDER holds the corpus and, after a crash, the input that caused it. `--plant` adds a decoder with a bug, to see that
bugs are found. Exits with 0 when the time is up and nothing but typed errors came out.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["swarm_protocol"]):
    from protocol.decoders import DECODERS
    from swarm_protocol.errors import IntegrityError, PeerViolation


def fuzz_one(data: bytes) -> None:
    """Pass the bytes to the decoder that the first byte chooses."""
    if not data:
        return
    decoder = DECODERS[data[0] % len(DECODERS)]
    try:
        value = decoder.decode(data[1:])
    except (PeerViolation, IntegrityError):
        return
    if decoder.encode is not None and decoder.decode(decoder.encode(value)) != value:
        raise AssertionError(f"{decoder.name} does not round-trip")


def fuzz_one_with_a_bug(data: bytes) -> None:
    fuzz_one(data)
    if data[1:3] == b"\x01\x0b":
        raise KeyError("planted")


def main(seconds: str, folder: str, *plant: str) -> None:
    for index, decoder in enumerate(DECODERS):
        for number, example in enumerate(decoder.examples):
            Path(folder, f"{decoder.name}-{number}").write_bytes(bytes([index]) + example)
    arguments = [f"-max_total_time={seconds}", f"-artifact_prefix={folder}/crash-", "-max_len=4096", "-timeout=30"]
    atheris.Setup([sys.argv[0], *arguments, folder], fuzz_one_with_a_bug if plant else fuzz_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
