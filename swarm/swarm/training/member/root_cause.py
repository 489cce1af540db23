"""What really failed, where tasks wrapped it in groups. Pure."""

from __future__ import annotations

from swarm_protocol.errors import SwarmError


def cause(error: BaseException) -> BaseException:
    """The failure inside the groups that tasks wrap it in; of several one of ours, or else the first."""
    while isinstance(error, BaseExceptionGroup):
        ours = [each for each in error.exceptions if isinstance(each, SwarmError)]
        error = (ours or error.exceptions)[0]
    return error
