"""`swarm-node run invite`, `run vouch` and `run revoke`: who enters a training run at once, and who does no more.

An invitation or a vouch is one word, printed alone on stdout, to be kept with `> FILE`. It is in no event and log, and
is sent to nobody: the newcomer shows it to the members itself. A revocation is given to the members that are there.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from swarm.network.membership import Membership
from swarm.training.outside.resume import deliver
from swarm.training.run.methods import Methods, short
from swarm.training.run.run_file import read_signed
from swarm.training.run.signed_run import SignedRun
from swarm_protocol.errors import ConfigError, PeerUnreachable
from swarm_protocol.identity import Identity, check_peer_id
from swarm_protocol.run_credentials import (
    MAX_USES,
    RunInvitation,
    RunRevocation,
    invite_to_run,
    sign_revocation,
    vouch_for,
)

from swarm_node import diagnostics, interrupts
from swarm_node.commands.invite import parse_lifetime, utc
from swarm_node.events.emitter import Emitter
from swarm_node.network_visit import retried, visiting
from swarm_node.settings.config import Config, UsageError
from swarm_node.settings.parsers import whole_number
from swarm_node.storage.home import explained
from swarm_node.storage.kept_invitation import write_private
from swarm_node.storage.new_file import check_new_file


def invite(
    path: Path,
    inviter: Identity,
    emitter: Emitter,
    *,
    network_id: str,
    expires: str | None,
    uses: str | None,
    node: str,
    out: Path | None,
) -> int:
    """Sign an invitation to the run of the file `path`. Raises ConfigError or UsageError, also if `inviter` may not
    invite to it."""
    run, lifetime_s, max_uses = read_signed(path), parse_lifetime(expires), _uses(uses)
    if out is not None:
        check_new_file(out)
    if not run.config.entrance.welcomes:
        raise ConfigError(
            f"{run.run_id} lets nobody in by invitation", remedy='sign a run with invitations = "welcome" or "required"'
        )
    if inviter.peer_id not in {run.peer_id, *run.config.inviters}:
        raise ConfigError(
            f"{inviter.peer_id} may not invite to {run.run_id}",
            remedy="sign with its author's key, or with one that its file names in inviters; give --identity",
        )
    node = _node(node)
    if node and max_uses > 1:
        raise UsageError("--uses and --for-node do not go together", remedy="leave one of them out")
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
    whoever = f"the node {node}" if node else ("whoever has it" if max_uses == 1 else f"the first {max_uses} nodes")
    emitter.emit(
        "run_invited",
        run=run.run_id,
        serial=f"{terms.serial:016x}",
        max_uses=max_uses,
        node=node,
        whoever=whoever,
        **_until(invitation),
        file=str(out) if out else "",
    )
    return _give(invitation, out, emitter)


def revoke(path: Path, author: Identity, emitter: Emitter, config: Config, *, serial: str, inviter: str) -> int:
    """Sign that an invitation, or an inviter, of the run of the file `path` counts no more, and give that to the
    members. Raises ConfigError, UsageError, StartError, and PeerUnreachable if no member took it."""
    run = read_signed(path)
    if author.peer_id != run.peer_id:
        raise ConfigError(
            f"{run.run_id} is signed by {run.peer_id}, and only that key can revoke its invitations",
            remedy="sign with the author's key: give --identity, or the home that holds it",
        )
    if not serial and not inviter:
        raise UsageError("neither --serial nor --inviter is given", remedy="say which invitation, or whose right")
    revocation = RunRevocation(
        run=run.run_id, serials=_serials(serial), inviters=tuple(filter(None, (_node(inviter, option="--inviter"),)))
    )

    async def give() -> None:
        async with visiting(config) as (network, membership):
            data = sign_revocation(author, revocation, network_id=network.network_id, now=network.now())
            peers = await retried(lambda: _trainers(membership, run.run_id))
            answers = await deliver(network, Methods(run.run_id).revoke, data, peers)
            taken = sorted(peer for peer, refusal in answers.items() if not refusal)
            for peer, refusal in answers.items():
                if refusal:
                    emitter.emit("warning", message=f"{short(peer)} did not take the revocation: {refusal}", remedy="")
            if not taken:
                raise PeerUnreachable("no member accepted the revocation", remedy="try again when a member is running")
            what = f"the invitation {serial}" if serial else f"the inviter {inviter}"
            emitter.emit("run_revoked", run=run.run_id, what=what, peers=taken)

    diagnostics.quieten_libraries()
    interrupts.raise_in_command()
    asyncio.run(give())
    return 0


async def _trainers(membership: Membership, run: str) -> tuple[str, ...]:
    """Raises PeerUnreachable if nobody trains `run`."""
    peers = tuple(await membership.trainers(run))
    if not peers:
        raise PeerUnreachable(f"no member of {run} is here", remedy="try again when a member is running")
    return peers


def _serials(text: str) -> tuple[int, ...]:
    try:
        serials = (int(text, 16),) if text else ()
    except ValueError:
        serials = (0,)
    if not all(0 < serial < 2**64 for serial in serials):
        raise UsageError(f"--serial: {text!r:.40} is not a serial", remedy="give 16 hexadecimal digits")
    return serials


def vouch(
    path: Path, member: Identity, emitter: Emitter, *, network_id: str, expires: str | None, node: str, out: Path | None
) -> int:
    """Sign for the newcomer `node` as a member of the run of the file `path`. Raises ConfigError or UsageError."""
    run, lifetime_s, newcomer = read_signed(path), parse_lifetime(expires), _node(node)
    if out is not None:
        check_new_file(out)
    if not newcomer:
        raise UsageError("--for-node is missing", remedy="give the peer id that swarm-node identity shows there")
    if newcomer == member.peer_id:
        raise UsageError("--for-node names this node itself", remedy="a member vouches for another node")
    _check_vouching(run)
    word = vouch_for(member, run.run_id, newcomer, network_id=network_id, now=time.time(), lifetime_s=lifetime_s)
    emitter.emit(
        "vouched",
        run=run.run_id,
        node=newcomer,
        voucher=member.peer_id,
        needed=run.config.vouchers,
        credits=run.config.entrance.vouch_credits,
        **_until(word),
        file=str(out) if out else "",
    )
    return _give(word, out, emitter)


def _check_vouching(run: SignedRun) -> None:
    if not run.config.vouchers:
        raise ConfigError(f"in {run.run_id} members cannot vouch", remedy="sign a run with vouchers above 0")


def _give(word: RunInvitation, out: Path | None, emitter: Emitter) -> int:
    if out is None:
        emitter.result(word.text())
        return 0
    with explained(f"write {out}", option="--out"):
        write_private(out, word.text().encode() + b"\n")
    return 0


def _until(word: RunInvitation) -> dict[str, object]:
    expires_at = word.envelope.expires_at
    return {
        "expires_at": expires_at,
        "until": utc(expires_at),
    }


def _uses(text: str | None) -> int:
    try:
        return 1 if text is None else whole_number(1, MAX_USES)(text)
    except ValueError as error:
        raise UsageError(f"--uses: {text!r} {error}", remedy="write --uses 5") from error


def _node(text: str, *, option: str = "--for-node") -> str:
    try:
        return check_peer_id(text) if text else ""
    except ValueError as error:
        raise UsageError(f"{option}: {error}", remedy="give what swarm-node identity shows on that machine") from None
