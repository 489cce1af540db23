"""Relays carry connections to peers that cannot be dialled (libp2p circuit relay v2)."""
