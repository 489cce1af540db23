"""Checks at the start whether a node may contribute to a run, since a node that may not could only watch it.

The run's members decide who enters (`swarm.training.standing.entrance`). This module refuses early what they would
certainly refuse. Does not import torch.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from swarm_protocol.errors import ConfigError

from swarm_node.settings.config import Config
from swarm_node.storage.home import Home

if TYPE_CHECKING:
    from swarm.training.run.signed_run import SignedRun


def check_may_enter(run: SignedRun, config: Config, peer_id: str) -> None:
    """Refuse a run to which the node `peer_id` may not contribute. `peer_id` is "" for a node without a key.

    A node whose home has checkpoints of the run may have entered it earlier. Raises ConfigError.
    """
    rule = run.config
    if peer_id in rule.admission:
        return
    run.check_names(peer_id)
    has_trained = (Home(config.home).checkpoints / run.run_id).exists()
    if not rule.entrance.required or has_trained:
        return
    if not config.invitation:
        raise ConfigError(
            f"{run.run_id} takes only nodes with an invitation, and this node has none",
            remedy="ask the run's author for an invitation, and give it with --run and --invitation",
        )
    if have_expired(config):
        raise ConfigError(
            f"the invitation to {run.run_id} has expired, and nobody enters that run without one",
            remedy="ask the inviter for a new invitation, and check this machine's clock",
        )


def have_expired(config: Config) -> bool:
    """Return whether the node was given invitations and all of them have expired."""
    given = config.invitation
    return bool(given) and all(each.envelope.expires_at <= time.time() for each in given)
