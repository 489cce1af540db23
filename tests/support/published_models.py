"""Tiny models with the manifest that a publisher signed beside them."""

from __future__ import annotations

import shutil
from pathlib import Path

from swarm.serving.manifest.publishing import publish
from swarm.serving.model.model_files import keep_beside
from swarm_protocol.identity import Identity
from swarm_protocol.manifest_messages import PublishedManifest

PUBLISHER = Identity(bytes([7]) * 32)
STRANGER = Identity(bytes([8]) * 32)


def published_copy(
    directory: Path, place: Path, *, name: str = "tiny", publisher: Identity = PUBLISHER
) -> PublishedManifest:
    """Copy a model to `place`, and publish it there."""
    shutil.copytree(directory, place)
    published = publish(place, name, publisher, published_at=1_700_000_000, origin="", on_bytes=lambda _num: None)
    keep_beside(published, place)
    return published


def flip_a_byte(path: Path, *, at: int = -1) -> None:
    """Change one byte of a file, the last by default; its size stays."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
