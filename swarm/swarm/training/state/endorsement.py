"""Endorsements: states that a run's author signed as part of the run's history.

A certificate proves that its voters agreed. It does not prove that they are the run's members, and keys cost nothing. A
member checks this by the roster of its own state. Newcomers, observers and exports have no state yet. They begin at the
newest endorsement that peers show them, and accept only states that follow from it (`ancestry`). Other systems call
such a signed state a weak subjectivity checkpoint (Buterin 2014).

An endorsement commits nothing and changes no history: members with a state go on from their own, and an endorsement
cannot undo steps. Members keep the newest one on disk, and show it to every peer that asks for their state.
"""

from __future__ import annotations

import logging
from pathlib import Path

from swarm_protocol.commit_messages import ENDORSEMENT_PURPOSE, Endorsement
from swarm_protocol.envelope import unseal, unverified
from swarm_protocol.errors import IntegrityError, PeerViolation

from swarm.training.state.certificate import RunSignatures, subject_of
from swarm.training.state.certificate_history import CertificateHistory
from swarm.whole_files import write_whole

logger = logging.getLogger(__name__)

_FILE_NAME = "endorsement.bin"


class Endorsements:
    """The newest endorsement of one run that a process knows. It is also kept in `folder`, if there is one, which
    belongs to one run and one process."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._data = b""
        self.newest: Endorsement | None = None

    def recall(self, signatures: RunSignatures, now: float) -> None:
        """Take the endorsement in the folder, unless it is no longer valid. Blocks."""
        if self._folder is None:
            return
        path = self._folder / _FILE_NAME
        try:
            self._keep(path.read_bytes(), signatures, now)
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("the run's endorsement cannot be read from %s: %s", path, error)
        except (PeerViolation, IntegrityError) as error:
            logger.warning("the endorsement that this member kept is not valid: %s", error)

    def take(self, data: bytes, signatures: RunSignatures, now: float) -> bool:
        """Take an endorsement that a peer shows. Return whether it is newer than the one known.

        Raises PeerViolation or IntegrityError unless the run's author signed it and it fits the run.
        """
        if data == self._data:
            return False
        is_new = self._keep(data, signatures, now)
        if is_new and self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                write_whole(self._folder / _FILE_NAME, (data,))
            except OSError as error:  # other members have it, too
                logger.warning("the run's endorsement cannot be kept in %s: %s", self._folder, error)
        return is_new

    def shown(self, now: float) -> bytes:
        """Return the endorsement to show to others; empty if there is none, or it has expired."""
        return self._data if self._data and now < unverified(self._data).expires_at else b""

    def _keep(self, data: bytes, signatures: RunSignatures, now: float) -> bool:
        endorsement = read_endorsement(data, signatures, now)
        if self.newest is not None and endorsement.sequence <= self.newest.sequence:
            return False
        self.newest, self._data = endorsement, data
        return True


def read_endorsement(data: bytes, signatures: RunSignatures, now: float) -> Endorsement:
    """Return the endorsement in `data`. Raises PeerViolation or IntegrityError unless the run's author signed it and it
    fits the run."""
    envelope = unseal(data, purpose=ENDORSEMENT_PURPOSE, network_id=signatures.network_id, now=now)
    endorsement = Endorsement.from_bytes(envelope.payload)
    if envelope.peer_id != signatures.author:
        raise PeerViolation("an endorsement is not signed by the run's author", peer_id=envelope.peer_id)
    if (endorsement.run, envelope.subject) != (signatures.run, subject_of(endorsement)):
        raise PeerViolation("an endorsement is of another run", peer_id=envelope.peer_id)
    if endorsement.outer_step > signatures.last_step or not signatures.admits(*endorsement.roster):
        raise PeerViolation("an endorsement is of a state that the run does not allow", peer_id=envelope.peer_id)
    return endorsement


def contradicts(endorsement: Endorsement, history: CertificateHistory) -> bool:
    """Return whether `history` has another state at the place of `endorsement`. False also if `history` no longer has
    the link of that place."""
    place = (endorsement.order_sequence, endorsement.outer_step, endorsement.next_attempt)
    return history.contradicts(place, endorsement.state_digest)
