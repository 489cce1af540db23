"""Calls, streams and records between peers. `interface` defines them; `libp2p_network` and `memory` implement them."""
