"""Peers, streams, calls and records: `interface` is the contract, `libp2p` and `memory` implement it."""
