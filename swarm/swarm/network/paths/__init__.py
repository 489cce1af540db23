"""Direct paths between peers, of which one or both may be behind a NAT.

A direct path comes to be like this, with the module of each step:

1. A node learns where it can be reached. `own_addresses` asks a few peers at which address they see it, and has them
   dial back the addresses that may lead to it. Addresses that were reached are announced. A node that nobody reaches
   announces addresses through relays instead (`swarm.network.relay`).
2. A node that calls a peer without a connection passes the peer's announced addresses to `dialler`. `dial_policy` drops
   those that are not worth a dial. The peer is dialled at its direct addresses first.
3. If none of these answers, `introductions` asks a relay of the peer to introduce the two to each other: the relay
   tells each where it sees the other one, and what that one claims of the other IP version. The peer with the smaller
   id then dials the other one.
4. Meanwhile the other one opens its NAT for this dial with a SYN of its own (`opener`), and passes the connection that
   comes of it to its libp2p daemon.
5. If that fails, too, the pair is connected through the relay, and `direct_paths.Upgrades` tries later to move it to a
   direct path.

`direct_paths` creates these parts and connects them with the host: read it first. The messages are in
`docs/reference/protocol/paths.md`, and the reasons in `docs/decisions/paths.md`.
"""
