"""The real network: `Network` over the libp2p daemon p2pd."""
