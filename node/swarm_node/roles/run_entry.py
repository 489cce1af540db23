"""Says at the start whether a node may contribute to a run, which it could otherwise only watch.

The run's members decide who enters (`swarm.training.standing.entrance`). This refuses early what they would refuse
for certain. Does not import torch.
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
    """Refuse a run in which the node `peer_id` may only watch. `peer_id` is empty for a node that has no key yet.

    A node whose home has trained the run may have entered it before. Raises ConfigError.
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
            f"{run.run_id} takes only nodes with an invitation, and this one was given none",
            remedy="ask its author for one, and give it with --run and --invitation",
        )
    if have_expired(config):
        raise ConfigError(
            f"the invitation to {run.run_id} has expired, and nobody enters that run without one",
            remedy="ask who gave it for a new one, and check the clock",
        )


def have_expired(config: Config) -> bool:
    """Return whether the node was given invitations, all of which have expired."""
    given = config.invitation
    return bool(given) and all(each.envelope.expires_at <= time.time() for each in given)
