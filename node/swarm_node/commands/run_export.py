"""Writes a certified state of a run as a Hugging Face model: from a checkpoint on disk, or the newest one of the
members.

Members hold only the newest state, and a home only the checkpoints that it keeps: any other state is lost. Once a run
is finished and its members have left, only checkpoints remain.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.training.outside.resume import RunSurvey, survey
from swarm.training.run.run_file import load_checked_run
from swarm.training.run.run_model import check_model
from swarm.training.run.signed_run import SignedRun
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.checkpoint import Checkpoint, is_checkpoint, load_newest, load_step, step_of, steps_in
from swarm.training.state.export import export_hf, fetch_named_state, find_tokenizer
from swarm.training.state.replica_state import ReplicaState
from swarm_protocol.errors import ConfigError, PeerTimeout, RoundError
from swarm_protocol.identity import Identity

from swarm_node import diagnostics
from swarm_node.commands.models import publish_directory
from swarm_node.events.emitter import Emitter
from swarm_node.formatting import plural, size
from swarm_node.network_join import FIND_S, retried, visiting
from swarm_node.roles.sources import run_of_id
from swarm_node.settings.config import Config
from swarm_node.settings.parsers import RunId
from swarm_node.storage.home import Home
from swarm_node.storage.kept_runs import kept_copy

_ELSEWHERE = (
    "name the home of a node that trained it with --home, a copy of its checkpoints with --checkpoint, "
    "or, while a member is there, a node of the network with --peers"
)
NUM_TRIES = 3
"""Tries to fetch the state: members may move on to the next state before the fetch begins."""
MAX_TOLD_STEPS = 20


def export_run(
    which: Path | RunId,
    outer_step: int | None,
    place: Path | None,
    config: Config,
    emitter: Emitter,
    *,
    name: str,
    publisher: Identity | None,
    checkpoints: Path | None,
) -> int:
    """Export a run's state.

    `which` is the run's file or id. The state comes from the directory `checkpoints` (one checkpoint, or a directory of
    one run's checkpoints), else from the members found through the peers of `config`, or without peers from its home.
    The state is that of `outer_step`, or the newest one. It is written to `place`, or to a new directory in the current
    one, and is published under `name` if the `publisher` that signs it is given. Raises ConfigError for a state that
    does not exist, IntegrityError, StartError, PeerTimeout or RoundError.
    """
    diagnostics.begin_work()
    if config.peers and checkpoints is None:
        run, state = asyncio.run(_from_members(which, outer_step, config, emitter))
    else:
        run, state = _from_disk(which, outer_step, checkpoints, config, emitter)
    place = place or Path(f"{run.run_id}-step-{state.outer_step}")
    export_hf(state.theta_N, run.config, place, tokenizer=config.tokenizer)
    digest = state.digest.hex()
    emitter.emit("exported", run=run.run_id, path=str(place), outer_step=state.outer_step, digest=digest)
    if publisher is not None:
        origin = f"run {run.run_id}, outer step {state.outer_step}"
        publish_directory(place, name, publisher, origin=origin, emitter=emitter)
    return 0


def _from_disk(
    which: Path | RunId, outer_step: int | None, checkpoints: Path | None, config: Config, emitter: Emitter
) -> tuple[SignedRun, ReplicaState]:
    home = Home(config.home)
    run = load_checked_run(which) if isinstance(which, Path) else kept_copy(home, which.run_id)
    keeper = checkpoints or home.path
    folder = checkpoints or home.checkpoints / (run.run_id if run else str(which))
    if checkpoints is not None and is_checkpoint(checkpoints):
        folder, outer_step = checkpoints.parent, step_of(checkpoints)
    steps = steps_in(folder)
    if run is None or not steps:
        run_id = run.run_id if run else str(which)
        raise ConfigError(f"{keeper} keeps no checkpoint of {run_id}", remedy=_remedy(checkpoints, run_id))
    if outer_step is not None and outer_step not in steps:
        raise ConfigError(
            f"{keeper} keeps no checkpoint of outer step {outer_step}, only of {_listed(steps)}",
            remedy="choose one of these; a node that joins with --keep-every N keeps more in the future",
        )
    checkpoint = load_newest(folder) if outer_step is None else load_step(folder, outer_step)
    if checkpoint is None:
        raise ConfigError(f"every checkpoint in {folder} is damaged", remedy=_ELSEWHERE)
    _check_certificate(run, checkpoint, config, emitter)
    return run, checkpoint.state


def _remedy(checkpoints: Path | None, run_id: str) -> str:
    """Return what to do if `checkpoints`, or the home, has nothing of the run.

    Users easily name a home, or the directory of all its runs, instead of the directory of one run.
    """
    if checkpoints is not None:
        for folder in (checkpoints / run_id, checkpoints / "checkpoints" / run_id):
            if steps_in(folder):
                return f"name the folder of the run: --checkpoint {folder}"
    return _ELSEWHERE


def _check_certificate(run: SignedRun, checkpoint: Checkpoint, config: Config, emitter: Emitter) -> None:
    """Warn of a certificate without votes. Raises IntegrityError for a certificate of another state."""
    signatures = RunSignatures.of_run(run, Identity.generate(), config.network_id)
    if signatures.proof_of(checkpoint.state.digest, checkpoint.certificate, time.time()) is None:
        message = f"nothing proves that the run's members committed outer step {checkpoint.state.outer_step}"
        remedy = "name the network that it was trained in with --network-id; a certificate expires after a year"
        emitter.warning(message, remedy=remedy)


async def _from_members(
    which: Path | RunId, outer_step: int | None, config: Config, emitter: Emitter
) -> tuple[SignedRun, ReplicaState]:
    emitter.say(f"looking for members that train {which}, for about {FIND_S:.0f} s if none answers")
    async with visiting(config) as (network, membership):
        try:
            if isinstance(which, RunId):
                run, _ = await run_of_id(network, membership, Home(config.home), which.run_id)
            else:
                run = load_checked_run(which)
            num_values = await asyncio.to_thread(check_model, run.config)
            await asyncio.to_thread(find_tokenizer, run.config, config.tokenizer)  # fetching the state may take hours
            return run, await newest_state(network, membership, run, num_values, outer_step, emitter.say)
        except PeerTimeout as error:  # as with a finished run, whose members have left
            raise PeerTimeout(error.message, remedy=_without_members(which, config)) from error


def _without_members(which: Path | RunId, config: Config) -> str:
    """Return what can be exported if no member of the run answers."""
    run_id = load_checked_run(which).run_id if isinstance(which, Path) else which.run_id
    folder = Home(config.home).checkpoints / run_id
    if steps := steps_in(folder):
        return f"leave out --peers: {folder} keeps the checkpoints of outer steps {_listed(steps)}"
    return (
        "on a machine that trained it, leave out --peers and give --home, or --checkpoint with a copy of "
        f"HOME/checkpoints/{run_id}; a member that is restarted with --then-serve stays and also gives its state"
    )


async def newest_state(
    network: Network,
    membership: Membership,
    run: SignedRun,
    num_values: int,
    outer_step: int | None,
    say: Callable[[str], None],
) -> ReplicaState:
    """Return the newest state that the run's members certify. `say` gets a line about what is fetched.

    Raises ConfigError if the state's step is not `outer_step`.
    """

    async def look() -> RunSurvey:
        return await survey(network, run, await membership.trainers(run.run_id))

    tries_left = NUM_TRIES
    while True:
        situation = await retried(look)
        newest = situation.proof.outer_step
        if outer_step not in (None, newest):
            raise ConfigError(
                f"the run's members only hold outer step {newest}, not {outer_step}",
                remedy="leave out --peers to use the checkpoints of this home, or name another home with --home",
            )
        holders = plural(len(situation.holders), "member")
        say(f"fetching the state of outer step {newest} from {holders}: {size(8 * num_values)} at most")
        try:
            digest = situation.proof.outcome.state_digest
            return await fetch_named_state(network, run, digest, situation.holders, num_values)
        except RoundError:
            tries_left -= 1
            if not tries_left:
                raise


def _listed(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[-MAX_TOLD_STEPS:]))
    return f"{shown} and {len(steps) - MAX_TOLD_STEPS} before" if len(steps) > MAX_TOLD_STEPS else shown
