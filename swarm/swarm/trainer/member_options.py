"""What a member that trains from Python chooses for itself. Values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import default_collate

from swarm.training.data import DEFAULT_DATA, LocalData
from swarm.training.run.local_options import ONE_CPU, LocalOptions

NETWORK_ID = "swarm"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberOptions:
    """`identity` is the file of the key that others know this member by, made if it is not there; None: one for this
    time, which will not do where the run admits certain peers only.

    `listen`, `announce` and `relay` are those of `Libp2pOptions`: others must reach this member to train with it.
    `local` and `data` say how, and on which files, a run is trained that its file describes; `start` is this member's
    copy of the checkpoint that the run starts from, which else comes from the hub. `collate` makes a batch of an own
    data set's samples.
    """

    network_id: str = NETWORK_ID
    identity: Path | None = None
    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    announce: tuple[str, ...] = ()
    relay: Literal["none", "use"] = "none"
    local: LocalOptions = ONE_CPU
    data: LocalData = DEFAULT_DATA
    start: Path | None = None
    collate: Callable[[list[Any]], Any] = default_collate


AS_USUAL = MemberOptions()
