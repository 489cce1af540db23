"""The doctor's checks of how a node finds its first peers: by names, and in the local network.

`Finding` is what any check of `swarm-node doctor` has found.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Literal

from swarm.network.discovery.dns_lookup import DnsLookup
from swarm.network.discovery.own_networks import kinds_to_dial, own_subnets
from swarm.network.discovery.peer_names import TIMEOUT_S, Lookup, is_named, resolve
from swarm_protocol.identity import Identity

from swarm_node.formatting import plural
from swarm_node.settings.config import Config

LISTEN_S = 2.0
"""Local peers answer at once; one that has just answered somebody else does within a second."""


Result = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; `remedy` is empty if it is ok."""

    check: str
    result: Result
    message: str
    remedy: str = ""


async def check_names(config: Config, lookup: Lookup | None = None) -> list[Finding]:
    """Check that each name among the peers leads to addresses that this node may dial."""
    lookup = lookup or DnsLookup(timeout_s=TIMEOUT_S)
    named = [text for text in config.peers if is_named(text)]
    kinds = kinds_to_dial(config.listen, [subnet.address for subnet in own_subnets()] if named else ())
    found = await asyncio.gather(*(resolve([text], lookup, kinds, timeout_s=TIMEOUT_S) for text in named))
    findings = []
    for text, resolved in zip(named, found, strict=True):
        if resolved.addrs:
            num_peers = len({addr.peer_id for addr in resolved.addrs})
            findings.append(Finding("names", "ok", f"{text} leads to {plural(num_peers, 'peer')}"))
        for failure in resolved.failures.values():
            remedy = "check the name and this machine's name servers, or give --peers the address itself"
            findings.append(Finding("names", "fail", f"{text}: {failure.message}", remedy))
    return findings


async def check_local_network(config: Config) -> list[Finding]:
    """Say which nodes of the network answer in the local network, where the node would look for them."""
    if not config.finds_local_peers:
        return []
    # only where the local network is looked at
    from swarm.network.discovery.local_discovery import LocalDiscovery  # noqa: PLC0415
    from swarm.network.discovery.multicast import MulticastLink, segments_of  # noqa: PLC0415

    segments = segments_of(own_subnets())
    if not segments:
        return [Finding("local network", "ok", "not searched: this machine is not in a private network")]
    link = await MulticastLink.open(segments, lambda _segment, _sender, _packet: None)
    opened = {each.interface for each in link.segments}
    link.close()
    if closed := {each.interface for each in segments} - opened:
        message = f"multicast cannot be used on {', '.join(sorted(closed))}"
        return [Finding("local network", "warn", message, "free UDP port 5353, or turn this search off with --no-mdns")]
    discovery = LocalDiscovery(
        config.network_id,
        Identity.generate().peer_id,
        lambda _subnets: (),
        secret=config.invite.network_secret if config.invite else None,
    )
    running = asyncio.create_task(discovery.run())
    found = await discovery.first(timeout_s=LISTEN_S)
    running.cancel()
    await asyncio.wait((running,))
    where = ", ".join(sorted({each.interface for each in segments}))
    who = plural(len(found), "node") if found else "no node"
    return [Finding("local network", "ok", f"{who} of {config.network_id} answered by multicast on {where}")]
