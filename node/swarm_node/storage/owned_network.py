"""A private network that this home owns: its key, its secret, and the invitations that the key has signed.

    HOME/network.key    the owner's Ed25519 key (0600), in the form of identity.key
    HOME/network.json   {"secret": …, "number": …, "issued": [{"serial", "rights", "issued_at", "expires_at", "node",
                        "note", "revoked"}, …]} (0600)
    HOME/network.lock   locked while a command changes network.json

An owner that loses the key can no longer invite or revoke. Members stay until their invitations expire.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace

from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, reason_of
from swarm_protocol.identity import Identity
from swarm_protocol.network_invitation import (
    RIGHTS,
    SECRET_BYTES,
    NetworkInvitation,
    NetworkSecret,
    Revocations,
    Right,
    invite,
    network_id_of,
    seal_revocations,
    serial_text,
)

from swarm_node.settings.config import Config
from swarm_node.storage import kept_invitation
from swarm_node.storage.home import Home, explained, locked_by, read_json, replace_json, write_private

MAX_FILE_BYTES = 4 * 2**20
MAX_ISSUED = 10_000
RENEW_S = 60 * 86400.0
"""The owner's own invitation is renewed when it expires within this many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedInvitation:
    """The owner keeps this of an invitation, but not its key. `serial` is hexadecimal, times are Unix seconds."""

    serial: str
    rights: tuple[str, ...]
    issued_at: float
    expires_at: float
    node: str = ""
    note: str = ""
    revoked: bool = False

    def state(self, now: float) -> str:
        """Return "valid", "revoked" or "expired"."""
        return "revoked" if self.revoked else "valid" if now < self.expires_at else "expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Book:
    secret: str
    number: int
    issued: tuple[IssuedInvitation, ...]


class OwnedNetwork:
    """The network that a home owns. Files are read for each command, and again before each change.

    Raises ConfigError for damaged files.
    """

    def __init__(self, home: Home) -> None:
        if not os.path.lexists(home.network_key):
            raise ConfigError(
                f"this home owns no private network: {home.path}",
                remedy="start one with swarm-node invite --new-network, or give the owner's --home",
            )
        self._home = home
        self._owner = Identity.load(home.network_key)
        self._book = self._read()

    @classmethod
    def create(cls, home: Home) -> OwnedNetwork:
        """Create a new network with this home as its first member. Raises ConfigError if the home already owns one."""
        home.create()
        if os.path.lexists(home.network_key):
            raise ConfigError(
                f"this home owns a private network already: {home.path}",
                remedy="leave out --new-network to invite somebody to it, or choose another --home",
            )
        book = _Book(secret=os.urandom(SECRET_BYTES).hex(), number=0, issued=())
        Identity.load_or_create(home.identity)
        _write(home, book)
        Identity.generate().save(home.network_key)
        owned = cls(home)
        owned.renew_own()
        return owned

    @property
    def network_id(self) -> str:
        return network_id_of(self._owner.peer_id)

    @property
    def issued(self) -> tuple[IssuedInvitation, ...]:
        """The signed invitations, oldest first."""
        return self._book.issued

    @property
    def own_serial(self) -> str:
        """The serial of the invitation by which this home's node is in the network, or "" if the home keeps none."""
        kept = kept_invitation.read(self._home)
        return serial_text(kept.terms.serial) if kept is not None and kept.network_id == self.network_id else ""

    def renew_own(self) -> None:
        """Sign an invitation for the owner's own nodes if the last one expires soon or was revoked."""
        serial = self.own_serial
        own = next((each for each in self._book.issued if each.serial == serial), None)
        if own is None or own.revoked or own.expires_at < time.time() + RENEW_S:
            renewed = self.invite(RIGHTS, lifetime_s=limits.MAX_SIGNED_LIFETIME_S, note="the owner's own nodes")
            kept_invitation.keep(self._home, renewed)

    def invite(
        self, rights: Sequence[Right], *, lifetime_s: float, seeds: Sequence[str] = (), node: str = "", note: str = ""
    ) -> NetworkInvitation:
        """Sign an invitation and record it. Raises ConfigError if a value is out of bounds or the record is full."""
        now = time.time()
        with self._changing():
            kept = self._with_room(now)
            try:
                invitation = invite(
                    self._owner,
                    rights=rights,
                    now=now,
                    lifetime_s=lifetime_s,
                    secret=bytes.fromhex(self._book.secret),
                    seeds=seeds,
                    node=node,
                )
            except ValueError as error:
                raise ConfigError(
                    f"such an invitation cannot be signed: {error}", remedy="see swarm-node invite --help"
                ) from None
            entry = IssuedInvitation(
                serial=serial_text(invitation.terms.serial),
                rights=tuple(invitation.terms.rights),
                issued_at=now,
                expires_at=invitation.expires_at,
                node=node,
                note=note,
            )
            self._save(replace(self._book, issued=(*kept, entry)))
        return invitation

    def _with_room(self, now: float) -> list[IssuedInvitation]:
        """Return the recorded invitations, with room for one more.

        Only expired ones are dropped: a revoked invitation that is dropped before it expires would be valid again with
        the next list.
        """
        kept = [each for each in self._book.issued if each.expires_at > now - limits.MAX_SIGNED_LIFETIME_S]
        num_over = len(kept) + 1 - MAX_ISSUED
        expired = [each for each in kept if each.expires_at <= now]
        if num_over > len(expired):
            raise ConfigError(
                f"{MAX_ISSUED} invitations have not expired yet, and no more can be signed",
                remedy="wait until some have expired, or start a new network",
            )
        forgotten = {each.serial for each in expired[: max(0, num_over)]}
        return [each for each in kept if each.serial not in forgotten]

    def revoke(self, serial: str, theirs: bytes = b"") -> IssuedInvitation:
        """Record a revocation, and keep the new list for this home's nodes. Raises ConfigError.

        The new list also contains what `theirs`, the list of the network's members, revokes. If the home's own
        invitation is revoked, its nodes get a new one.
        """
        with self._changing():
            entry = self._revoke(serial, theirs, time.time())
        if entry.serial == self.own_serial:
            self.renew_own()
        return entry

    def check_may_revoke(self, serial: str) -> IssuedInvitation:
        """Return the invitation with this serial. Raises ConfigError if it is unknown or has expired."""
        found = next((each for each in self._book.issued if each.serial == serial.lower()), None)
        if found is None:
            raise ConfigError(f"no invitation has the serial {serial[:40]!r}", remedy="see swarm-node invite list")
        if found.expires_at <= time.time():
            raise ConfigError(f"the invitation {found.serial} has expired already", remedy="nothing needs to be done")
        return found

    def _revoke(self, serial: str, theirs: bytes, now: float) -> IssuedInvitation:
        entry = replace(self.check_may_revoke(serial), revoked=True)
        # a restored backup lacks what was signed and revoked later
        lists = kept_invitation.read_revocations(self._home), theirs
        known = [kept_invitation.opened_revocations(self.network_id, each) or Revocations() for each in lists]
        gone = {entry.serial, *(serial_text(each) for revoked in known for each in revoked.serials)}
        issued = tuple(replace(each, revoked=each.revoked or each.serial in gone) for each in self._book.issued)
        revoked = [each.serial for each in issued if each.revoked and each.expires_at > now]
        serials = tuple(int(each, 16) for each in (*revoked, *sorted(gone.difference(each.serial for each in issued))))
        if len(serials) > limits.MAX_REVOKED:
            raise ConfigError(
                f"more than {limits.MAX_REVOKED} invitations would be revoked that have not expired",
                remedy="wait until some have expired, or start a new network",
            )
        number = max(self._book.number, *(each.number for each in known)) + 1
        signed = seal_revocations(self._owner, Revocations(number=number, serials=serials), now)
        # first: what the record alone called revoked would be valid for all nodes
        with explained("keep the list of revocations", self._home.revocations):
            write_private(self._home.revocations, signed)
        self._save(replace(self._book, issued=issued, number=number))
        return entry

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the record exclusively, after reading it again, so that entries of other commands are not lost."""
        self._home.check_own()
        with ExitStack() as held:
            with explained("lock"):
                held.enter_context(locked_by(self._home.network_lock))
            self._book = self._read()
            yield

    def _save(self, book: _Book) -> None:
        _write(self._home, book)
        self._book = book

    def _read(self) -> _Book:
        try:
            data = read_json(self._home.network, max_bytes=MAX_FILE_BYTES)
            issued = tuple(IssuedInvitation(**{**each, "rights": tuple(each["rights"])}) for each in data["issued"])
            book = _Book(secret=str(data["secret"]), number=int(data["number"]), issued=issued)
            NetworkSecret(bytes.fromhex(book.secret))
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            raise ConfigError(
                f"{self._home.network} is missing or broken", remedy="restore it from a backup, with network.key"
            ) from None
        return book


def with_own_renewed(config: Config, home: Home) -> Config:
    """Return the settings, with a new invitation if the home owns the network and its invitation expires soon or was
    revoked.

    Raises ConfigError.
    """
    if config.invite is None or "invite" in config.origins or not os.path.lexists(home.network_key):
        return config
    owned = OwnedNetwork(home)
    if config.network_id != owned.network_id:
        return config
    owned.renew_own()
    return config.model_copy(update={"invite": kept_invitation.read(home)})


def _write(home: Home, book: _Book) -> None:
    try:
        replace_json(home.network, asdict(book))
    except OSError as error:
        raise ConfigError(
            f"{home.network} cannot be written: {reason_of(error)}", remedy="free some space, or check its permissions"
        ) from None
