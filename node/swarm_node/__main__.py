"""The console script. `python -m swarm_node` does the same, even if the script is not on the PATH."""

from swarm_node import interrupts


def main() -> None:
    """Handle Ctrl-C first, then import the command line, which takes a while."""
    interrupts.end_process()
    from swarm_node import cli  # noqa: PLC0415

    cli.main()


if __name__ == "__main__":
    main()
