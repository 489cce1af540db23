"""What each `swarm-node` command does: one module a command, with `run(flags) -> exit code`.

A module is imported only when its command runs, so it may import what it needs. SwarmError says what the user has to
know; `swarm_node.cli` prints it.
"""
