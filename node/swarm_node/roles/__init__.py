"""A node's work on the network: being a seed, helping where work is lacking, serving a model, training a run.

A role is a `swarm_node.node.NodeRole`. The roles of gateway and dashboard are in their own packages.
"""
