"""Fetches a run's newest certified state for somebody who takes no part in it, such as to export it. No state."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from swarm.network.interface import Network
from swarm.training.round.methods import Methods
from swarm.training.run.resume import Situation
from swarm.training.run.signed_run import SignedRun
from swarm.training.state.replica import Held
from swarm.training.state.replica_state import ReplicaState
from swarm.training.state.state_transfer import Fetcher


async def fetch_state(network: Network, run: SignedRun, situation: Situation, num_values: int) -> ReplicaState:
    """The state of `situation`, from those who hold it, checked against its certificate. The run's model has
    `num_values` parameters.

    Raises RoundError if they do not give it, as when they have gone on meanwhile.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="swarm-fetch") as executor:
        fetcher = Fetcher(network, Methods(run.run_id), executor)
        blank = Held.of(ReplicaState.initial(torch.zeros(num_values)))
        digest = situation.proof.outcome.state_digest
        return (await fetcher.state(digest, situation.holders, [blank])).state
