"""Holds what client and server share on the wire: multiplexed connections and tensors as rows."""
