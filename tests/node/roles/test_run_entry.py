"""A run is refused at the start only if its members would certainly refuse this node."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.node_settings import resolve
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_file import sign_run
from swarm_node.roles.run_entry import check_may_enter
from swarm_node.settings.config import Config
from swarm_node.storage.home import Home
from swarm_node.storage.kept_runs import keep_copy
from swarm_protocol.errors import ConfigError
from swarm_protocol.identity import Identity
from swarm_protocol.run_credentials import invite_to_run

AUTHOR, NODE = Identity(bytes(32)), Identity(bytes([1]) * 32)
NONE, EXPIRED = "takes only nodes with an invitation, and this node has none", "the invitation to .* has expired"


def told(home: Path, run_id: str = "", *lifetimes_s: float) -> Config:
    """Return the settings of a node whose invitations to the run expire after these seconds."""
    if not lifetimes_s:
        return resolve({"home": str(home)}, env={})
    begun = time.time() - 3600.0
    given = [
        invite_to_run(AUTHOR, run_id, network_id="swarm", now=begun, lifetime_s=3600.0 + each) for each in lifetimes_s
    ]
    return resolve({"home": str(home), "run": run_id, "invitation": [each.text() for each in given]}, env={})


@pytest.mark.parametrize(
    ("lifetimes_s", "is_listed", "has_trained", "refusal"),
    [
        ((), False, False, NONE),
        ((-60.0,), False, False, EXPIRED),
        ((-60.0, 60.0), False, False, ""),
        ((), True, False, ""),
        ((-60.0,), True, False, ""),
        ((), False, True, ""),
        ((-60.0,), False, True, ""),
    ],
)
def test_run_that_requires_invitations_is_refused_at_a_node_that_cannot_enter(
    lifetimes_s: tuple[float, ...], is_listed: bool, has_trained: bool, refusal: str, tmp_path: Path
) -> None:
    """It would follow the run for all that time, and no step would count its work."""
    listed = (NODE.peer_id,) if is_listed else ()
    run = sign_run(RunConfig(name="story", invitations="required", admission=listed), AUTHOR, issued_at=1)
    if has_trained:
        keep_copy(Home(tmp_path), run)
    config = told(tmp_path, run.run_id, *lifetimes_s)
    if refusal:
        with pytest.raises(ConfigError, match=refusal):
            check_may_enter(run, config, NODE.peer_id)
    else:
        check_may_enter(run, config, NODE.peer_id)
    open_run = sign_run(replace(run.config, invitations="welcome", admission=()), AUTHOR, issued_at=1)
    check_may_enter(open_run, config, NODE.peer_id)


def test_run_of_named_peers_is_refused_at_others_with_any_invitation(tmp_path: Path) -> None:
    run = sign_run(RunConfig(name="story", admission=(NODE.peer_id, AUTHOR.peer_id)), AUTHOR, issued_at=1)
    keep_copy(Home(tmp_path), run)
    config = told(tmp_path, run.run_id, 60.0)
    check_may_enter(run, config, NODE.peer_id)
    other = Identity(bytes([2]) * 32).peer_id
    with pytest.raises(ConfigError, match=f"admits only the peers in its setting admission, and not {other}"):
        check_may_enter(run, config, other)
    with pytest.raises(ConfigError, match="and not this node, which has no key yet"):
        check_may_enter(run, config, "")
