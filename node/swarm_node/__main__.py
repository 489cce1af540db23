"""The console script; `python -m swarm_node` is the same, even where the script is not on the path."""

from swarm_node import interrupts


def main() -> None:
    """Import the command line once Ctrl-C is handled: that takes a while."""
    interrupts.end_process()
    from swarm_node import cli  # noqa: PLC0415

    cli.main()


if __name__ == "__main__":
    main()
