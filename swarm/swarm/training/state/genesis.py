"""The genesis of a run: the state before its first outer step, whose digest the run's author has signed.

Each member makes it by itself, from the run's seed or checkpoint. Rounds that only admit members change who holds
leases and not the weights, so a state of outer step 0 can be compared with the genesis no matter who was admitted. No
state.

Shapes: N values of the flat parameter vector.
"""

from __future__ import annotations

from dataclasses import replace

from swarm_protocol.errors import IntegrityError
from torch import Tensor

from swarm.training.run.run_config import RunConfig
from swarm.training.standing.standings import Register
from swarm.training.state.lease import first_stripes
from swarm.training.state.replica_state import Manifest, ReplicaState

MAX_DRAWN_VALUES = 256_000_000
"""The largest model whose weights are drawn only to pin them: 3 GB of memory, and half a minute of one core."""


def genesis_digest(theta_N: Tensor, config: RunConfig) -> str:
    """Return the digest of the state with which a run of `config` begins at `theta_N`. Blocks."""
    return ReplicaState.initial(theta_N, config.overlap_steps).digest.hex()


def check_genesis(manifest: Manifest, config: RunConfig) -> None:
    """Raises IntegrityError if this is a state before the first outer step, and not of the weights that the run's
    author has signed. A run that does not pin its genesis allows any."""
    if manifest.outer_step or not config.start.genesis:
        return
    first = replace(
        manifest,
        roster=(),
        stripes=first_stripes(config.overlap_steps),
        probation=(),
        register=Register(),
        held_out=(),
        drawn=(),
    )
    if (digest := first.digest().hex()) != config.start.genesis:
        raise IntegrityError(
            f"this state has other first weights than the run's author signed: {digest[:12]} instead of "
            f"{config.start.genesis[:12]}",
            remedy="ask others for it; if this machine made it, report its processor and its version of torch",
        )
