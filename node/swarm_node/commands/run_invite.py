"""`swarm-node run invite`, `run vouch` and `run revoke`: who may enter a training run at once, and who no longer may.

An invitation or a vouch is one word, printed alone on stdout so that `> FILE` can keep it. With `--json`, events go to
stdout and the word to stderr. No event and no log contains the word, and no peer receives it: the newcomer itself shows
it to the members. A revocation is sent to the members that are there. Each command checks its options first, then the
files that they name, then the key, and last the run, so that a mistyped option is reported before slow reads.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence

from swarm.network.membership import Membership
from swarm.training.run.methods import Methods
from swarm.training.run.run_file import load_signed_run
from swarm.training.run.signed_run import SignedRun
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, PeerUnreachable
from swarm_protocol.run_credentials import (
    MAX_USES,
    RunInvitation,
    RunRevocation,
    invite_to_run,
    sign_revocation,
    vouch_for,
)

from swarm_node import diagnostics
from swarm_node.commands.command_options import Flags, run_file, signing_identity, with_peers
from swarm_node.commands.invite import give_text, lifetime_of, peer_option
from swarm_node.commands.run_orders import give
from swarm_node.events.emitter import Emitter
from swarm_node.formatting import utc
from swarm_node.network_join import retried, visiting
from swarm_node.settings.config import UsageError
from swarm_node.settings.parsers import whole_number
from swarm_node.storage.home import Home, check_new_file

_SERIAL = re.compile(r"[0-9a-fA-F]{16}")


def invite(flags: Flags) -> int:
    """Sign an invitation to the run of a file. Raises ConfigError or UsageError, for example if the key may not
    invite."""
    options, emitter = flags.options, Emitter(json=flags.json)
    lifetime_s, node = lifetime_of(flags), peer_option(flags, "for_node")
    max_uses = flags.parsed("uses", whole_number(1, MAX_USES), "write --uses 5") or 1
    if node and max_uses > 1:
        raise UsageError("--uses and --for-node cannot be combined", remedy="leave one of them out")
    path, out = run_file(flags), options["out"]
    check_new_file(out)
    inviter, network_id = signing_identity(flags, with_any_key=False), flags.member().network_id
    run = load_signed_run(path)
    if not run.config.entrance.welcomes:
        raise ConfigError(
            f"{run.run_id} does not accept invitations", remedy='sign a run with invitations = "welcome" or "required"'
        )
    if inviter.peer_id not in {run.peer_id, *run.config.inviters}:
        raise ConfigError(
            f"{inviter.peer_id} may not invite to {run.run_id}",
            remedy="with --identity, name the author's key or the key of an inviter that the run file names",
        )
    invitation = invite_to_run(
        inviter,
        run.run_id,
        network_id=network_id,
        now=time.time(),
        lifetime_s=lifetime_s,
        max_uses=max_uses,
        node=node,
    )
    terms = invitation.terms
    assert terms is not None
    others = "one node that has it" if max_uses == 1 else f"the first {max_uses} nodes"
    give_text(invitation.text(), out, emitter)
    emitter.emit(
        "run_invited",
        run=run.run_id,
        serial=f"{terms.serial:016x}",
        max_uses=max_uses,
        node=node,
        admits=f"the node {node}" if node else others,
        **_until(invitation),
        file=str(out or ""),
    )
    return 0


def revoke(flags: Flags) -> int:
    """Sign that invitations, or an inviter, of a run are no longer valid, and send this to the members.

    Raises ConfigError, UsageError, StartError, and PeerUnreachable if no member took the revocation.
    """
    options, emitter = flags.options, Emitter(json=flags.json)
    serials, inviter = _serials(options["serial"] or ()), peer_option(flags, "inviter")
    if not serials and not inviter:
        raise UsageError(
            "neither --serial nor --inviter is given",
            remedy="name an invitation with --serial, or an inviter with --inviter",
        )
    path, config, author = run_file(flags), with_peers(flags), signing_identity(flags, with_any_key=False)
    run = load_signed_run(path)
    run.check_author(author.peer_id, "revoke its invitations")
    revocation = RunRevocation(run=run.run_id, serials=serials, inviters=(inviter,) if inviter else ())

    async def revoke_there() -> None:
        async with visiting(config) as (network, membership):
            data = sign_revocation(author, revocation, network_id=network.network_id, now=network.now())
            peers = await retried(lambda: _trainers(membership, run.run_id))
            method = Methods(run.run_id).revoke
            taken = await give(network, method, data, peers, "revocation", emitter)
            emitter.emit("run_revoked", run=run.run_id, what=_named(revocation), peers=taken)

    diagnostics.begin_work()
    asyncio.run(revoke_there())
    return 0


async def _trainers(membership: Membership, run: str) -> tuple[str, ...]:
    """Return the peers that train `run`. Raises PeerUnreachable if there are none."""
    peers = tuple(await membership.trainers(run))
    if not peers:
        raise PeerUnreachable(f"no member of {run} was found", remedy="try again when a member is running")
    return peers


def _serials(texts: Sequence[str]) -> tuple[int, ...]:
    """Read serials, each once. One text may hold several, separated by commas. Raises UsageError."""
    words = [word for text in texts for word in text.replace(",", " ").split()]
    for word in words:
        if not _SERIAL.fullmatch(word) or not int(word, 16):
            raise UsageError(
                f"--serial: {word!r:.40} is not the serial of an invitation",
                remedy="give the 16 hexadecimal digits that run invite shows, or status on a member",
            )
    serials = tuple(dict.fromkeys(int(word, 16) for word in words))
    if len(serials) > limits.MAX_RUN_REVOKED:
        raise UsageError(
            f"--serial: {len(serials)} serials are too many for one revocation",
            remedy=f"give at most {limits.MAX_RUN_REVOKED} at a time",
        )
    return serials


def _named(revocation: RunRevocation) -> str:
    """Return a description of what is revoked."""
    serials = ", ".join(f"{serial:016x}" for serial in revocation.serials)
    invitations = f"the {'invitation' if len(revocation.serials) == 1 else 'invitations'} {serials}" if serials else ""
    return " and ".join(filter(None, (invitations, *(f"the inviter {each}" for each in revocation.inviters))))


def vouch(flags: Flags) -> int:
    """Sign for a newcomer, as a member of the run of a file. Raises ConfigError or UsageError."""
    options, emitter = flags.options, Emitter(json=flags.json)
    lifetime_s, newcomer = lifetime_of(flags), peer_option(flags, "for_node")
    if not newcomer:
        raise UsageError(
            "--for-node is missing", remedy="give the newcomer's peer id, which swarm-node identity shows there"
        )
    path, out = run_file(flags), options["out"]
    check_new_file(out)
    member, network_id = signing_identity(flags, with_any_key=False), flags.member().network_id
    if newcomer == member.peer_id:
        raise UsageError("--for-node names this node itself", remedy="a member vouches for another node")
    run = load_signed_run(path)
    _check_vouching(run, Home(flags.resolve().home))
    word = vouch_for(member, run.run_id, newcomer, network_id=network_id, now=time.time(), lifetime_s=lifetime_s)
    give_text(word.text(), out, emitter)
    emitter.emit(
        "vouched",
        run=run.run_id,
        node=newcomer,
        voucher=member.peer_id,
        needed=run.config.vouchers,
        credits=run.config.entrance.vouch_credits,
        **_until(word),
        file=str(out or ""),
    )
    return 0


def _check_vouching(run: SignedRun, home: Home) -> None:
    """Raise ConfigError if members of the run cannot vouch, or if this home is not a member's.

    A node keeps its votes with its checkpoints, and a `swarm.Trainer` beside its key.
    """
    if not run.config.vouchers:
        raise ConfigError(f"members of {run.run_id} cannot vouch", remedy="sign a run with vouchers above 0")
    kept = (home.checkpoints / run.run_id, home.identity.with_name(f"{home.identity.name}.votes") / run.run_id)
    if not any(path.exists() for path in kept):
        raise ConfigError(
            f"{home.path} holds nothing of {run.run_id}: only a member that has trained the run can vouch",
            remedy="name the home of the node that trains it with --home",
        )


def _until(word: RunInvitation) -> dict[str, object]:
    expires_at = word.envelope.expires_at
    return {"expires_at": expires_at, "until": utc(expires_at)}
