"""A private network for tests: its owner, invitations, and nodes that join with one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarm.network.libp2p.libp2p_options import Libp2pOptions
from swarm.network.libp2p_network import Libp2pNetwork
from swarm_protocol.identity import Identity
from swarm_protocol.network_invitation import (
    RIGHTS,
    NetworkInvitation,
    Revocations,
    Right,
    invite,
    network_id_of,
    seal_revocations,
)

DAY_S = 86400.0


class Owner:
    """`now` is the time at which invitations are signed; the wall clock's if it is left out."""

    def __init__(self, seed: int = 1) -> None:
        self.identity = Identity(bytes([seed]) * 32)
        self.secret = bytes([seed + 1]) * 32
        self.network_id = network_id_of(self.identity.peer_id)

    def invite(
        self,
        *rights: Right,
        lifetime_s: float = DAY_S,
        node: str = "",
        now: float | None = None,
        seeds: Sequence[str] = (),
    ) -> NetworkInvitation:
        """Without `rights` it has all of them."""
        return invite(
            self.identity,
            rights=rights or RIGHTS,
            now=time.time() if now is None else now,
            lifetime_s=lifetime_s,
            secret=self.secret,
            node=node,
            seeds=seeds,
        )

    def revoke(self, *serials: int, number: int = 1, now: float | None = None) -> bytes:
        at = time.time() if now is None else now
        return seal_revocations(self.identity, Revocations(number=number, serials=serials), at)


async def private_node(
    identity_path: Path, invitation: NetworkInvitation, *, peers: Sequence[str] = (), **options: Any
) -> Libp2pNetwork:
    Identity.load_or_create(identity_path)
    return await Libp2pNetwork.create(
        Libp2pOptions(
            identity_path=identity_path,
            network_id=invitation.network_id,
            peers=tuple(peers),
            invitation=invitation,
            **options,
        )
    )
