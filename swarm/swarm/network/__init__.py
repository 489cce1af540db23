"""Peers, streams, calls and records: `interface` is the contract, the packages `libp2p` and `memory` implement it."""
