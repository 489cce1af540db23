"""Connections to peers that cannot be dialled, carried by nodes that can (libp2p circuit relay v2)."""
