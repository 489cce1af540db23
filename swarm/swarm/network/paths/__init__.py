"""Direct paths between peers, of which one or both may be behind a NAT.

A direct path is made in these steps, each with its module:

1. A node learns where it can be reached. `address_survey` asks a few peers at which address they see the node, and has
   them dial the addresses that may lead to it (`peer_addresses`). `own_addresses` announces those that peers reached,
   and addresses through relays (`swarm.network.relay`) if no peer reaches the node.
2. A node that calls a peer without a connection passes the peer's announced addresses to `dialler`. `dial_policy` drops
   those that are not worth a dial. The peer is dialled at its direct addresses first.
3. If none of these answers, `introductions` asks a relay of the peer to introduce the two nodes to each other. The
   relay tells each node where it sees the other one, and which addresses of the other IP version that one claims. The
   node with the smaller id then dials the other one.
4. Meanwhile the node with the greater id opens its NAT for this dial with a SYN of its own (`opener`), and passes the
   resulting connection to its libp2p daemon.
5. If that fails, too, the two are connected through the relay, and `direct_paths.Upgrades` tries later to replace this
   path by a direct one.

`direct_paths` creates these parts and connects them with the host. Read it first. The messages are in
`docs/reference/protocol/paths.md`, and the reasons in `docs/decisions/paths.md`.
"""
