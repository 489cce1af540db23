"""Get a model's signed manifest from a server that announces its digest. Any server will do: the digest names it."""

from __future__ import annotations

from collections.abc import Iterable

from swarm_protocol.errors import IntegrityError, PeerError, PeerUnreachable, PeerViolation, SwarmError
from swarm_protocol.manifest_messages import (
    MANIFEST_METHOD,
    ModelManifestRequest,
    PublishedManifest,
    SignedManifest,
    open_manifest,
)

from swarm.network.interface import Network

FETCH_TIMEOUT_S = 10.0
"""A manifest has some kilobytes, 512 KiB at most."""

MAX_ASKED_FOR_A_MANIFEST = 3
"""Servers that are asked for one manifest."""


async def fetch_manifest(network: Network, model: str, digest: bytes, peer_ids: Iterable[str]) -> PublishedManifest:
    """Return the manifest of `model` with that digest from the first of a few servers that gives it.

    Raises PeerError, the last server's.
    """
    failure: PeerError = PeerUnreachable(f"nobody gave the manifest of {model}", remedy="try again in a moment")
    for peer_id in list(peer_ids)[:MAX_ASKED_FOR_A_MANIFEST]:
        try:
            return await _from(network, model, digest, peer_id)
        except PeerError as error:
            failure = error
    raise failure


async def _from(network: Network, model: str, digest: bytes, peer_id: str) -> PublishedManifest:
    request = ModelManifestRequest(digest=digest).to_bytes()
    try:
        answer = await network.call(
            peer_id,
            f"{MANIFEST_METHOD}/{model}",
            request,
            timeout_s=FETCH_TIMEOUT_S,
            max_bytes=SignedManifest.MAX_BYTES,
        )
        published = open_manifest(answer)
    except PeerError:
        raise
    except IntegrityError as error:
        raise PeerViolation("the server gave a manifest with a wrong signature", peer_id=peer_id) from error
    except SwarmError as error:
        raise PeerError(error.message, peer_id=peer_id) from error
    if published.digest != digest or published.manifest.name != model:
        raise PeerViolation(f"the server gave another manifest than the one of {model} it announces", peer_id=peer_id)
    return published
