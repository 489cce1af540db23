"""Serves a run's signed file, and fetches it for a node that knows only the run's id.

The id contains a digest of what was signed, so a node need not trust the member that sends the file. No state.
"""

from __future__ import annotations

import asyncio
import random

from swarm_protocol.errors import ConfigError, IntegrityError, PeerRefused, PeerTimeout, SwarmError
from swarm_protocol.identity import short_id

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.training.run.methods import Methods
from swarm.training.run.signed_run import MAX_RUN_FILE_BYTES, SignedRun, parse_signed_run

FETCH_TIMEOUT_S = 10.0
"""Enough to connect and to receive MAX_RUN_FILE_BYTES at 0.1 Mbit/s."""

FIND_TIMEOUT_S = 20.0
"""The records of running members are found within a second or two; several members may have to be asked."""
FIND_PAUSE_S = 1.0
MAX_ASKED_AT_ONCE = 8


async def serve_run(network: Network, run: SignedRun) -> None:
    """Give the run's file to every peer that asks, until the network is closed."""

    async def give(_peer_id: str, _request: bytes) -> bytes:
        if not run.text:
            raise PeerRefused("this member does not have the run's file", remedy="ask another member")
        return run.text.encode()

    await network.serve(Methods(run.run_id).run_file, give)


async def fetch_run(network: Network, peer_id: str, run_id: str, *, timeout_s: float = FETCH_TIMEOUT_S) -> SignedRun:
    """Fetch the file of run `run_id` from its member `peer_id`. Does not check that the model can be built.

    Raises PeerError, and IntegrityError if the peer's answer is not the signed file of this run.
    """
    data = await network.call(peer_id, Methods(run_id).run_file, b"", timeout_s=timeout_s, max_bytes=MAX_RUN_FILE_BYTES)
    try:
        run = await asyncio.to_thread(parse_signed_run, data, f"the file that {short_id(peer_id)} gave")
    except (ConfigError, IntegrityError) as error:
        raise IntegrityError(
            f"the peer did not give the file of run {run_id}: {error.message}",
            remedy="ask another member",
            peer_id=peer_id,
        ) from error
    if run.run_id != run_id:
        raise IntegrityError(
            f"the peer gave the file of run {run.run_id} instead of {run_id}",
            remedy="ask another member",
            peer_id=peer_id,
        )
    return run


async def find_run(
    network: Network, membership: Membership, run_id: str, *, timeout_s: float = FIND_TIMEOUT_S
) -> SignedRun:
    """Fetch the file of run `run_id` from any of its members. Does not check that the model can be built.

    Raises PeerTimeout if no member gives it in time.
    """
    asked, reason = set[str](), "nobody trains it on this network"
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout_s
    while (left_s := until - loop.time()) > 0:
        try:
            records = await membership.trainers(run_id, timeout_s=left_s)
            # in random order, so that records cannot claim a place before others
            members = sorted(records, key=lambda peer: (peer in asked, random.random()))
            members = [peer for peer in members if peer != network.peer_id][:MAX_ASKED_AT_ONCE]
            asked.update(members)
            if members:
                return await _first_copy(network, members, run_id, until - loop.time())
        except SwarmError as error:
            reason = error.message
        await asyncio.sleep(FIND_PAUSE_S)
    raise PeerTimeout(
        f"no member gave the file of run {run_id}: {reason}",
        remedy="check the id, --peers and --network-id, or give the run's file in place of its id",
    )


async def _first_copy(network: Network, members: list[str], run_id: str, timeout_s: float) -> SignedRun:
    """Return the file from the first of `members` that gives it. Raises the last failure if none does."""
    wait_s = min(timeout_s, FETCH_TIMEOUT_S)
    fetching = [asyncio.create_task(fetch_run(network, peer, run_id, timeout_s=wait_s)) for peer in members]
    failure: SwarmError | None = None
    try:
        for copy in asyncio.as_completed(fetching):
            try:
                return await copy
            except SwarmError as error:
                failure = error
    finally:
        for task in fetching:
            task.cancel()
        await asyncio.gather(*fetching, return_exceptions=True)
    assert failure is not None
    raise failure
