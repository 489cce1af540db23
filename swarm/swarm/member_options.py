"""The settings that a member training from Python chooses for itself (`swarm.trainer`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from swarm_protocol.errors import ConfigError
from swarm_protocol.network_invitation import NetworkInvitation
from swarm_protocol.run_credentials import RunInvitation
from torch.utils.data import default_collate

from swarm.training.data.local_data import DEFAULT_DATA, LocalData
from swarm.training.inner.one_device import ONE_CPU, LocalOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberOptions:
    """The settings that a member training from Python chooses for itself.

    `identity` is the file with the key that names this member to others; it is created if it does not exist. The folder
    `FILE.votes` beside it keeps this member's promises and votes in each run, so that a restart does not vote for
    something else. Keep the two together; a second process that uses them is refused. The folder also keeps the
    evidence that convicts other members, and the author's newest endorsement. None makes a key for this session and
    keeps nothing, which does not work if the run admits only certain peers.

    `checkpoints` is a directory for the member's newest two checkpoints, in `RUN/PEER`, from which it goes on after a
    restart. They have the committed state, and the moments of the optimizer that a run's file describes; your own
    module's optimizer and buffers begin anew. They need an `identity`, since a run waits for the members that it had.
    With None, a restarted member gets the state from others, and if all members stop, the run is lost.

    `invite` is the invitation to a private network, or its text. The default of `network_id` is the invitation's, or
    "swarm". `invitations` are the invitation to the run, or vouches of its members, or their texts, as
    `swarm-node run invite` and `run vouch` print them.

    `listen`, `announce` and `relay` are those of `Libp2pOptions`: others must reach this member to train with it.
    Without `listen`, a member that joins through a peer beyond this machine listens on all interfaces, and any other on
    loopback, where only members on this machine reach it. By default others reach it through relays until peers have
    confirmed that they reach it directly; then it relays for others.

    `local` and `data` are the options and files for training a run that its file describes; `start` is this member's
    copy of the checkpoint from which the run starts, which is otherwise downloaded from the hub. `collate` makes a
    batch of samples of your own data set.
    """

    network_id: str = ""
    invite: str | NetworkInvitation | None = None
    invitations: tuple[str | RunInvitation, ...] = ()
    identity: str | Path | None = None
    checkpoints: str | Path | None = None
    listen: tuple[str, ...] | None = None
    announce: tuple[str, ...] = ()
    relay: Literal["none", "use", "auto"] = "auto"
    local: LocalOptions = ONE_CPU
    data: LocalData = DEFAULT_DATA
    start: str | Path | None = None
    collate: Callable[[list[Any]], Any] = default_collate

    def __post_init__(self) -> None:
        if self.checkpoints is not None and self.identity is None:
            raise ConfigError(
                "checkpoints are of no use to a member whose key ends with the session",
                remedy="give it a lasting key: MemberOptions(identity=FILE, checkpoints=DIRECTORY)",
            )
