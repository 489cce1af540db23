"""`python -m swarm_node` is `swarm-node`, also where the script is not on the path."""

from swarm_node.cli import main

if __name__ == "__main__":
    main()
