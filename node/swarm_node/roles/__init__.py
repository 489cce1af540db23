"""Runs a node's work once it is on the network: seed, help where work is lacking, serve a model, train a run.

A role is a `swarm_node.node.NodeRole`. The gateway and the dashboard have theirs in their own packages.
"""
