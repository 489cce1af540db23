"""`swarm-node seed`, `join`, `gateway` and `dashboard`.

Each locks the home, then runs a daemon until it is done or told to leave.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from swarm_protocol.errors import ConfigError
from swarm_protocol.identity import Identity
from swarm_protocol.run_credentials import check_given

from swarm_node import diagnostics
from swarm_node.commands.command_list import SERVING, TRAINING
from swarm_node.commands.command_options import Flags, imported, say_lookup
from swarm_node.events.emitter import Emitter
from swarm_node.machine.hardware import LEAST_PROCESS_BYTES, PROCESS_BYTES, share_of_limit
from swarm_node.machine.lean_imports import lean_imports, let_threads_sleep
from swarm_node.roles.run_entry import check_may_enter, have_expired
from swarm_node.settings.config import Config, UsageError
from swarm_node.settings.parsers import RUN_ID_FORM, RunId
from swarm_node.shutdown import ignore_hangup
from swarm_node.storage import remembered_peers
from swarm_node.storage.home import Home
from swarm_node.storage.kept_invitation import check_member, check_right, keep_first
from swarm_node.storage.owned_network import with_own_renewed

if TYPE_CHECKING:
    from swarm_node.node import NodeRole


def seed(flags: Flags) -> int:
    config = flags.member()
    if not config.listen:
        raise UsageError(
            "a seed needs an address to listen on", remedy="give an address, such as --listen /ip4/0.0.0.0/tcp/4001"
        )
    return live(flags, config, "swarm_node.roles.seed:SeedRole", joins=False)


def join(flags: Flags) -> int:
    config, emitter = flags.member(), Emitter(json=flags.json, goes_on=True)
    _check_work(config)
    config = _within_rights(config)
    run, run_id = None, config.run.run_id if isinstance(config.run, RunId) else ""
    if isinstance(config.run, Path):
        # refuse a file that is not a run, or was changed after signing, before torch is imported to try the run's model
        from swarm.training.run.run_file import load_signed_run  # noqa: PLC0415

        run = load_signed_run(config.run)
        run_id = run.run_id
    key = Home(config.home).identity
    peer_id = Identity.load(key).peer_id if run_id and key.exists() else ""
    _check_invitations(config, run_id, peer_id)
    if run is not None:
        check_may_enter(run, config, peer_id)
    if have_expired(config):
        emitter.warning(
            f"the invitation to {run_id} has expired: this node goes on without it",
            remedy="ask the inviter for a new invitation, and check this machine's clock",
        )
    if config.model:
        let_threads_sleep()
        say_lookup(config.model, emitter)
    idle = "helper:StandbyRole" if config.take == "nothing" else "helper:HelperRole"
    role = idle if _is_free(config) else "volunteer:VolunteerRole"
    is_slow = not _is_free(config) or (config.take != "nothing" and config.probe != "off")
    return live(flags, config, f"swarm_node.roles.{role}", joins=True, is_slow=is_slow)


def _check_invitations(config: Config, run_id: str, peer_id: str) -> None:
    """Refuse an invitation that cannot let the node `peer_id` into the run `run_id`, or that is given without a run.

    Raises ConfigError.
    """
    if config.invitation and not run_id:
        raise UsageError(
            f"no run is named, so {config.origin('invitation')} has no effect",
            remedy="also give the run's file or id with --run",
        )
    check_given(config.invitation, peer_id, run_id, network_id=config.network_id)


def gateway(flags: Flags) -> int:
    config = flags.member()
    check_right(config, "ask", "answer requests")
    return live(flags, config, "swarm_node.gateway.role:GatewayRole", joins=True, listens=True)


def dashboard(flags: Flags) -> int:
    return live(flags, flags.member(), "swarm_node.dashboard.app:DashboardRole", joins=True, listens=True)


def _within_rights(config: Config) -> Config:
    """Return the settings, with `take` limited to work that the node's invitation has the right to.

    Raises ConfigError if the node was given other work.
    """
    if config.invite is None:
        return config
    given = config.take if "take" in config.origins else ""
    if config.model or config.then_serve or given == "models":
        check_right(config, "serve", "serve a model")
    if config.run or given == "runs":
        check_right(config, "train", "train a run")
    rights = {"serve": "models", "train": "runs"}
    kinds = [kind for right, kind in rights.items() if right in config.invite.terms.rights]
    if not _is_free(config) or config.take != "any" or len(kinds) == len(rights):
        return config
    origins = {**config.origins, "take": "the rights of this node's invitation"}
    return config.model_copy(update={"take": kinds[0] if kinds else "nothing", "origins": origins})


def _check_work(config: Config) -> None:
    """Refuse settings that contradict each other or name missing files, before slow imports. Raises ConfigError."""
    _check_combined(config)
    if isinstance(config.run, Path) and not config.run.is_file():
        found = "is a directory, not a run file" if config.run.is_dir() else "does not exist"
        raise ConfigError(
            f"{config.run} {found}",
            remedy=f"give --run the file that the run's author signed, such as run.toml, or {RUN_ID_FORM}",
        )
    _check_data(config)
    check_model_directories(config)
    if config.max_memory:
        _check_memory(config)


def _is_free(config: Config) -> bool:
    """Return whether the node takes what the network needs, as it was given no work."""
    return not (config.run or config.model)


def _check_combined(config: Config) -> None:
    """Refuse settings that contradict each other, or have no effect beside the others. Raises UsageError."""
    if config.run and config.model:
        raise UsageError("a node either trains or serves", remedy="give --run or --model; --then-serve does both")
    if config.then_serve and not config.run:
        raise UsageError("--then-serve needs --run", remedy="to serve an existing model, give --model DIR")
    if "take" in config.origins and not _is_free(config):
        raise UsageError("--take cannot be combined with --run or --model", remedy="leave out --take")
    takes = config.take if _is_free(config) else "nothing"
    if not (config.model or config.then_serve):
        # a node that takes what the network needs chooses blocks and dtype itself
        names = ("dtype", "blocks") if takes in {"any", "models"} else SERVING
        remedy = "give --model DIR, or --run RUN with --then-serve"
        _refuse_without_effect(config, names, "there is nothing to serve", remedy)
    if not config.run and takes not in {"any", "runs"}:
        _refuse_without_effect(config, TRAINING, "there is nothing to train", "also give --run RUN")


def _refuse_without_effect(config: Config, names: Iterable[str], reason: str, remedy: str) -> None:
    """Raise UsageError if a setting of these `names` was given, for this `reason`."""
    for name in names:
        if name in config.origins:
            raise UsageError(f"{reason}, so {config.origin(name)} has no effect", remedy=remedy)


def _check_memory(config: Config) -> None:
    """Refuse a limit that leaves nothing for a model, and name what a local model needs. Raises ConfigError."""
    try:
        # the memory of the process itself is known later, and counts only if the model is in the same memory
        share_of_limit(config.max_memory, LEAST_PROCESS_BYTES if config.device == "cpu" else 0)
    except ConfigError:
        if isinstance(config.model, Path):
            from swarm_node.roles.serving import needed_bytes  # noqa: PLC0415  imports torch

            share_of_limit(config.max_memory, PROCESS_BYTES, needed_bytes(config.model, config.dtype, config.blocks))
        raise


def _check_data(config: Config) -> None:
    """Refuse missing data or a missing tokenizer, unless the run's pinned tokens are cached. Raises ConfigError."""
    named = {"--data": config.data, "--tokenizer": config.tokenizer}
    missing = [(option, path) for option, path in named.items() if path is not None and not path.exists()]
    if missing and not _keeps_tokens_of(config):
        option, path = missing[0]
        raise ConfigError(f"{path} does not exist", remedy=f"give {option} an existing path")


def _keeps_tokens_of(config: Config) -> bool:
    from swarm.training.data.local_data import shared_cache  # noqa: PLC0415
    from swarm.training.data.token_file import digests_in  # noqa: PLC0415

    if not isinstance(config.run, Path):
        return True  # the run's pins are known once its file is here
    text = config.run.read_text(errors="replace")
    return any(digest in text for digest in digests_in(shared_cache()))


def check_model_directories(config: Config) -> None:
    """Refuse a directory without a model. A model on a hub is checked later. Raises ConfigError."""
    for option, place, other in (("--model", config.model, ", or OWNER/NAME on a hub"), ("--start", config.start, "")):
        if isinstance(place, Path):
            check_model_directory(place, f"give {option} the directory of config.json and *.safetensors{other}")


def check_model_directory(place: Path, remedy: str) -> None:
    """Raise ConfigError with `remedy` if `place` has no config.json."""
    if not (place / "config.json").is_file():
        absent = "it is a file" if place.is_file() else "there is no such directory"
        found = "it holds no config.json" if place.is_dir() else absent
        raise ConfigError(f"{place} is not a Hugging Face model directory: {found}", remedy=remedy)


def live(
    flags: Flags, config: Config, role_code: str, *, joins: bool, listens: bool = False, is_slow: bool = False
) -> int:
    """Lock the home and run the role whose class `role_code` names. Return the exit code.

    `joins` means that the role needs a peer to join through, and `listens` that it serves HTTP at the port of the
    settings. A role that `is_slow` loads torch or measures the machine.
    """
    ignore_hangup()
    emitter = Emitter(json=flags.json, goes_on=True)
    home = Home(config.home)
    home.create()
    with home.locked():
        diagnostics.set_up(home.log, log_format=config.log_format, level=config.log_level)
        config = with_own_renewed(config, home)
        check_member(config, home, Identity.load_or_create(home.identity).peer_id)
        keep_first(config, home)
        config = remembered_peers.choose_listen(config)
        # the last quick check: after correcting this, a user should not meet another mistake
        if joins:
            remembered_peers.check_can_join(config)
        if listens:
            from swarm_node.http.server import listen  # noqa: PLC0415

            listen(config.host, config.port).close()  # the role listens there again
        if config.metrics is not None:
            from swarm_node.metrics.exporter import bound  # noqa: PLC0415

            bound(config.metrics).close()  # the exporter binds the address again once it can answer
        # the checks above come first, because importing torch and the network takes seconds
        if is_slow:
            emitter.emit("starting")  # otherwise nothing is printed for many seconds on a busy machine
        with lean_imports():
            role: NodeRole = imported(role_code)(config)
            from swarm_node import daemon  # noqa: PLC0415

        diagnostics.quieten_libraries()
        return daemon.run(config, home, emitter, role)
