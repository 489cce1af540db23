"""The code of each `swarm-node` command: functions `(flags) -> exit code`.

A module is imported only when one of its commands runs, so it may import what it needs. Functions raise SwarmError for
what the user must know; `swarm_node.cli` prints it.
"""
