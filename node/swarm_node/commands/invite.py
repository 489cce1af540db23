"""`swarm-node invite create`, `invite list` and `invite revoke`: invitations to a private network that this home owns.

`create` prints the invitation alone on stdout, so that `> FILE` can keep it. No event and no log contains it.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from dataclasses import asdict
from pathlib import Path

from swarm.network.multiaddr import is_loopback, is_relayed
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, PeerError, StartError
from swarm_protocol.identity import check_peer_id
from swarm_protocol.network_invitation import RIGHTS, Right

from swarm_node import diagnostics
from swarm_node.commands.command_options import Flags
from swarm_node.events.emitter import Emitter
from swarm_node.formatting import plural, utc
from swarm_node.settings.config import Config, UsageError
from swarm_node.settings.parsers import length_of_time
from swarm_node.storage.home import Home, check_new_file, explained, write_private
from swarm_node.storage.kept_invitation import with_invitation
from swarm_node.storage.owned_network import IssuedInvitation, OwnedNetwork
from swarm_node.storage.remembered_peers import remembered

DEFAULT_RIGHTS = "join,serve,train,ask"
DEFAULT_LIFETIME = "30d"
MAX_NOTE_CHARS = 64
_LIFETIME = length_of_time(60, limits.MAX_SIGNED_LIFETIME_S, "such as 90m, 12h or 30d")


def create(flags: Flags) -> int:
    options, config, home = flags.options, flags.resolve(), Home(flags.home())
    rights, lifetime_s = parse_rights(options["rights"] or DEFAULT_RIGHTS), lifetime_of(flags)
    node, note = peer_option(flags, "for_node"), _note(options["note"] or "")
    check_new_file(options["out"])
    emitter = Emitter(json=flags.json)
    owned = OwnedNetwork.create(home) if options["new_network"] else OwnedNetwork(home)
    if options["new_network"]:
        option = f" --home {shlex.quote(str(home.path))}" if flags.values["home"] else ""
        emitter.emit("network_created", network_id=owned.network_id, home=str(home.path), option=option)
    owned.renew_own()
    seeds = _seeds(config, home)
    if not seeds and options["new_network"]:
        return 0
    if not seeds:
        raise ConfigError(
            "an invitation names a node to join through, and no node of this network is known",
            remedy="start a seed with this --home first, or give --peers the address of a member",
        )
    invitation = owned.invite(rights, lifetime_s=lifetime_s, seeds=seeds, node=node, note=note)
    give_text(invitation.text(), options["out"], emitter)
    emitter.emit(
        "invited",
        serial=f"{invitation.terms.serial:016x}",
        network_id=invitation.network_id,
        rights=list(invitation.terms.rights),
        rights_text=", ".join(invitation.terms.rights),
        expires_at=invitation.expires_at,
        until=utc(invitation.expires_at),
        file=str(options["out"] or ""),
    )
    return 0


def give_text(text: str, out: Path | None, emitter: Emitter) -> None:
    """Print an invitation or a vouch, or write it to `out`.

    Writing comes before the event that reports it, because the disk may be full.
    """
    if out is None:
        emitter.result(text)
        return
    with explained("write", out, option="--out"):
        write_private(out, text.encode() + b"\n")


def show(flags: Flags) -> int:
    owned, emitter, now = OwnedNetwork(Home(flags.home())), Emitter(json=flags.json), time.time()
    if flags.json:
        emitter.emit(
            "invitations",
            network_id=owned.network_id,
            invitations=[_listed(each, now) for each in owned.issued],
        )
        return 0
    emitter.result(f"network {owned.network_id}, {plural(len(owned.issued), 'invitation')}")
    for each in owned.issued:
        about = "  ".join(filter(None, (each.note, f"for {each.node}" if each.node else "")))
        state = f"{each.state(now):<7}  until {utc(each.expires_at)}"
        emitter.result(f"{each.serial}  {state}  {','.join(each.rights)}  {about}".rstrip())
    return 0


def _listed(each: IssuedInvitation, now: float) -> dict[str, object]:
    fields = asdict(each)
    del fields["revoked"]  # its state includes this
    return {**fields, "state": each.state(now)}


def revoke(flags: Flags) -> int:
    serial = flags.needed("serial", "give a serial that swarm-node invite list shows")
    home, emitter = Home(flags.home()), Emitter(json=flags.json)
    owned = OwnedNetwork(home)
    own_serial = owned.own_serial
    owned.check_may_revoke(serial)
    # a home restored from a backup lacks later revocations, so fetch the network's list whatever this home's list says
    theirs, trouble = _exchange_lists(flags, home, brings=b"")
    entry = owned.revoke(serial, theirs)
    # if nobody was reached a moment ago, only another invitation of this home could reach a member
    if not trouble or entry.serial == own_serial:
        _, trouble = _exchange_lists(flags, home)
    if trouble:
        emitter.warning(
            f"the revocation is signed, but no member has it yet: {trouble}",
            remedy="start a node with this --home, or revoke again with --peers the address of a member",
        )
    emitter.emit("revoked", serial=entry.serial, told=not trouble)
    if entry.serial == own_serial:
        emitter.warning(
            f"this home's own node used that invitation, and now has a new one: {owned.own_serial}",
            remedy=f"restart the node, and restart others that used the old one with --invite {home.invitation}",
        )
    return 0


def _exchange_lists(flags: Flags, home: Home, *, brings: bytes | None = None) -> tuple[bytes, str]:
    """Bring this home's revocation list, or `brings`, to the network, whose members pass it on.

    Return the list that the members then have, and what prevented the exchange (an empty string if nothing did).
    """
    config = with_invitation(flags.resolve())
    config = config.model_copy(update={"peers": _seeds(config, home) or _remembered(config)})
    if not config.peers:
        return b"", "no node of this network is known"
    # the network takes half a second to import
    from swarm_node.network_join import visiting  # noqa: PLC0415

    async def visit() -> bytes:
        # joining exchanges the list with every node that is greeted
        async with visiting(config, revocations=brings) as (network, _):
            return network.revocations

    diagnostics.begin_work()
    try:
        return asyncio.run(visit()), ""
    except (StartError, PeerError, ConfigError) as error:
        return b"", error.message


def _remembered(config: Config) -> tuple[str, ...]:
    return tuple(f"{addr}/p2p/{each.peer_id}" for each in remembered(config) for addr in each.addrs)


def _seeds(config: Config, home: Home) -> tuple[str, ...]:
    """Return the given addresses, or those of the daemon that runs in this home."""
    found = config.peers
    if not found and home.owner() is not None:
        from swarm_node.control import ControlClient  # noqa: PLC0415 - gRPC

        addrs = tuple(addr for addr in ControlClient(home).status().addrs if not is_relayed(addr))
        found = tuple(addr for addr in addrs if not is_loopback(addr)) or addrs
    return found[: limits.MAX_CONTACT_ADDRS]


def parse_rights(text: str) -> tuple[Right, ...]:
    """Read rights separated by commas. Raises UsageError."""
    words = text.replace(",", " ").split()
    unknown = [word for word in words if word not in RIGHTS]
    if unknown or not words:
        raise UsageError(
            f"--rights: {unknown[0][:40] if unknown else text!r} is not a right",
            remedy=f"give some of {', '.join(RIGHTS)}",
        )
    return tuple(right for right in RIGHTS if right == "join" or right in words)


def lifetime_of(flags: Flags) -> float:
    """Return the lifetime in seconds from `--expires`, such as 30d, 12h or 90m. Raises UsageError."""
    return flags.parsed("expires", _LIFETIME, "write --expires 30d") or _LIFETIME(DEFAULT_LIFETIME)


def peer_option(flags: Flags, name: str) -> str:
    """Return the peer id in the option `name`, or "" if it was not given. Raises UsageError."""
    try:
        return check_peer_id(text) if (text := flags.options[name]) else ""
    except ValueError as error:
        remedy = "give the peer id that swarm-node identity shows on that machine"
        raise UsageError(f"--{name.replace('_', '-')}: {error}", remedy=remedy) from None


def _note(text: str) -> str:
    if len(text) > MAX_NOTE_CHARS or not text.isprintable():
        raise UsageError(
            f"--note is not one line of at most {MAX_NOTE_CHARS} characters", remedy="make the note one short line"
        )
    return text
