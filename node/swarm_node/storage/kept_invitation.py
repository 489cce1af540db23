"""The invitation by which a node is in a private network: given by its settings, or kept in its home.

    HOME/invitation     the invitation's text (0600), written as a node starts whose home has none, and otherwise once
                        the node has joined with another one
    HOME/revocations    the newest list of revocations that the node knows, signed by the network's owner

The text is a secret. No message, event or log contains it.
"""

from __future__ import annotations

import logging
import time

from swarm.network.libp2p.libp2p_options import check_invitation
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, SwarmError, reason_of
from swarm_protocol.network_invitation import (
    MAX_TEXT_CHARS,
    RIGHTS,
    NetworkInvitation,
    Revocations,
    Right,
    open_revocations,
    parse_invitation,
)

from swarm_node.settings.config import Config
from swarm_node.storage.home import Home, write_private

MAX_LIST_BYTES = limits.MAX_REVOCATIONS_BYTES + limits.MAX_ENVELOPE_OVERHEAD_BYTES

logger = logging.getLogger(__name__)


def with_invitation(config: Config) -> Config:
    """Return the settings of a node that may be in a private network.

    They have the invitation's network id, and its seeds if no peers are named. The invitation is the given one, or else
    the one that the home keeps, unless another network is named. Raises ConfigError if a private network is named
    without an invitation to it.
    """
    invitation = config.invite
    if invitation is None:
        kept = read(Home(config.home))
        if kept is not None and ("network_id" not in config.origins or config.network_id == kept.network_id):
            invitation = kept
    if invitation is None or "network_id" in config.origins:
        check_invitation(config.network_id, invitation)
    if invitation is None:
        return config
    peers = config.peers or tuple(invitation.seeds)
    return config.model_copy(update={"invite": invitation, "network_id": invitation.network_id, "peers": peers})


def check_right(config: Config, right: Right, to_do: str) -> None:
    """Raise ConfigError if the node's invitation lacks the right that it needs `to_do` its work.

    The right to serve includes the right to ask.
    """
    rights = config.invite.terms.rights if config.invite is not None else RIGHTS
    if right not in rights and not (right == "ask" and "serve" in rights):
        raise ConfigError(
            f"this node's invitation does not have the right to {right}, which it needs to {to_do}",
            remedy="ask the network's owner for an invitation with that right: swarm-node invite --rights",
        )


def check_member(config: Config, home: Home, peer_id: str) -> None:
    """Raise ConfigError if the invitation does not make the node `peer_id` a member now.

    It may have expired, be bound to another node, or be revoked in the list that this home keeps.
    """
    if config.invite is not None:
        from swarm.network.private.member_roll import MemberRoll  # noqa: PLC0415  - few commands need it

        MemberRoll(config.invite, peer_id, time.time(), revocations=read_revocations(home))


def read(home: Home) -> NetworkInvitation | None:
    """Return the invitation in a home, or None if there is none. Raises ConfigError for an invalid file."""
    try:
        text = home.invitation.read_text(encoding="utf-8")[: MAX_TEXT_CHARS + 1]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{home.invitation} cannot be read: {reason_of(error)}", remedy="move it away") from None
    try:
        return parse_invitation(text)
    except ConfigError as error:
        raise ConfigError(f"{home.invitation}: {error.message}", remedy="move it away, and give --invite") from None


def keep(home: Home, invitation: NetworkInvitation) -> None:
    """Keep an invitation for the next start. A failing disk only causes a warning."""
    try:
        write_private(home.invitation, invitation.text().encode() + b"\n")
    except OSError as error:
        logger.warning("the invitation is not kept for the next start: %s", error)


def keep_first(config: Config, home: Home) -> None:
    """Keep the invitation of a home that has none before the node joins, so that a start that ends early loses none.

    Another invitation replaces a kept one only once the node has joined with it.
    """
    if config.invite is not None and not home.invitation.exists():
        keep(home, config.invite)


def read_revocations(home: Home) -> bytes:
    """Return the list that the home keeps, or b"". The caller checks its contents."""
    try:
        with home.revocations.open("rb") as file:
            data = file.read(MAX_LIST_BYTES + 1)
    except OSError:
        return b""
    return data if len(data) <= MAX_LIST_BYTES else b""


def keep_revocations(home: Home, network_id: str, revocations: bytes) -> None:
    """Keep a network's list if it is newer than the kept one. A failing disk only causes a warning.

    `swarm-node invite revoke` may have kept a list in this home that the home's daemon does not know yet.
    """
    heard = opened_revocations(network_id, revocations)
    if heard is None or heard.number <= open_kept_revocations(home, network_id).number:
        return
    try:
        write_private(home.revocations, revocations)
    except OSError as error:
        logger.warning("the list of revocations is not kept: %s", error)


def open_kept_revocations(home: Home, network_id: str) -> Revocations:
    """Return the contents of the kept list of that network. Without a list they are empty."""
    return opened_revocations(network_id, read_revocations(home)) or Revocations()


def opened_revocations(network_id: str, revocations: bytes) -> Revocations | None:
    """Return the contents of a list, or None if it is not a valid list of that network."""
    try:
        return open_revocations(revocations, network_id=network_id, now=time.time())
    except SwarmError:
        return None
