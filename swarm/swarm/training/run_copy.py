"""A run's signed file for whoever has only heard of the run's id: each member gives it, and nobody has to be believed.

The id is made of what was signed, so a file that gives another id is another run's, whoever sent it. No state.
"""

from __future__ import annotations

import asyncio

from swarm_protocol.errors import ConfigError, IntegrityError, PeerRefused

from swarm.network.interface import Network
from swarm.training.methods import Methods
from swarm.training.signed_run import MAX_RUN_FILE_BYTES, SignedRun, read_run

FETCH_TIMEOUT_S = 10.0
"""MAX_RUN_FILE_BYTES over 0.1 Mbit/s, and a way there."""


async def serve_run(network: Network, run: SignedRun) -> None:
    """Give the run's file to whoever asks, until the network is closed."""

    async def give(_peer_id: str, _request: bytes) -> bytes:
        if not run.text:
            raise PeerRefused("this member does not have the run's file", remedy="ask another member")
        return run.text.encode()

    await network.serve(Methods(run.run_id).run_file, give)


async def fetch_run(network: Network, peer_id: str, run_id: str, *, timeout_s: float = FETCH_TIMEOUT_S) -> SignedRun:
    """The file of run `run_id` from its member `peer_id`. That the run's model can be built is not checked.

    Raises PeerError, and IntegrityError if what the peer gave is no signed file of this run.
    """
    data = await network.call(peer_id, Methods(run_id).run_file, b"", timeout_s=timeout_s, max_bytes=MAX_RUN_FILE_BYTES)
    try:
        run = await asyncio.to_thread(read_run, data, f"the file that {peer_id[-6:]} gave")
    except (ConfigError, IntegrityError) as error:
        raise IntegrityError(
            f"the peer gave no file of run {run_id}: {error.message}", remedy="ask another member", peer_id=peer_id
        ) from error
    if run.run_id != run_id:
        raise IntegrityError(
            f"the peer gave the file of another run than {run_id}: {run.run_id}",
            remedy="ask another member",
            peer_id=peer_id,
        )
    return run
