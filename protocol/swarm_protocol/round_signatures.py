"""The bytes that the members of a round sign: commitments to slices, reports to a coordinator, and votes.

Each begins with its purpose. Every field after it has one length, or ends with a zero byte, which no name holds, or
follows its own number of items, or is what is left at the end. Whole numbers are big-endian.
"""

from __future__ import annotations

import struct

from swarm_protocol.commit_messages import Vote
from swarm_protocol.proof_messages import StatedReport, StatedVote
from swarm_protocol.training_messages import Contribution, Group, Ready

SLICES_DOMAIN = b"swarm-slices:"
REPORT_DOMAIN = b"swarm-report:"
VOTE_DOMAIN = b"swarm-vote:"
_NUMBER_BYTES = 8
_NOTHING = bytes(32)


def slices_message(network_id: str, run: str, step: int, state_digest: bytes, root: bytes) -> bytes:
    """Return what a member signs to commit to its slices of `step` of `run`."""
    return SLICES_DOMAIN + _round(network_id, run, step) + state_digest + root


def report_message(network_id: str, place: Group | Ready, sequence: int, report: Contribution) -> bytes:
    """Return what a member signs to report ready for the attempt of `place`, the report itself or a group that carries
    it. By that it promises to vote in no earlier attempt at the step.

    `sequence` is that of the last resume order that it knows. The member itself is named by the key that signs.
    """
    stated = StatedReport(
        step=place.step, attempt=place.attempt, state_digest=place.state_digest, sequence=sequence, report=report
    )
    return stated_report_message(network_id, place.run, stated)


def stated_report_message(network_id: str, run: str, stated: StatedReport) -> bytes:
    """Return what the signature of this report in `run` is of."""
    report = stated.report
    locked, commitment = report.locked, report.commitment
    return b"".join(
        (
            REPORT_DOMAIN,
            _round(network_id, run, stated.step),
            _number(stated.attempt),
            _number(stated.sequence),
            stated.state_digest,
            _number(report.num_tokens),
            _number(report.num_samples),
            struct.pack(">d", report.loss),
            bytes([report.leaving]),
            _number(report.bytes_per_s),
            commitment.root if commitment else _NOTHING,
            bytes([locked is not None]),
            _number(locked.attempt if locked else 0),
            locked.outcome_digest if locked else _NOTHING,
            _number(len(report.followers)),
            *(
                _number(each.place)
                + _number(each.num_tokens)
                + _number(each.num_samples)
                + bytes([each.leaving])
                + _number(each.steps_left)
                for each in report.followers
            ),
            *(newcomer.encode() + b"\x00" for newcomer in report.newcomers),
            _number(report.steps_left),
            bytes([report.discounted]),
            _number(len(report.effects)),
            *(each.to_bytes(_NUMBER_BYTES, "big", signed=True) for each in report.effects),
            _entrance(report),
        )
    )


def _entrance(report: Contribution) -> bytes:
    """Return what a report says of who enters the run and who loses standing; empty if it says nothing of either."""
    if not report.credentials and not report.demoted:
        return b""
    digests = b"".join(each.digest() for each in report.credentials)
    return _number(len(report.credentials)) + digests + b"".join(peer.encode() + b"\x00" for peer in report.demoted)


def vote_message(network_id: str, vote: Vote) -> bytes:
    """Return what a member signs to vote."""
    return _vote_message(network_id, vote.run, vote, vote.outcome.digest())


def stated_vote_message(network_id: str, run: str, vote: StatedVote) -> bytes:
    """Return what the signature of this vote in `run` is of."""
    return _vote_message(network_id, run, vote, vote.outcome_digest)


def _vote_message(network_id: str, run: str, vote: Vote | StatedVote, outcome_digest: bytes) -> bytes:
    place = VOTE_DOMAIN + vote.kind.encode() + b"\x00" + _round(network_id, run, vote.step) + _number(vote.attempt)
    return place + vote.group_digest + outcome_digest + vote.state_digest + _number(vote.sequence)


def _round(network_id: str, run: str, step: int) -> bytes:
    return network_id.encode() + b"\x00" + run.encode() + b"\x00" + _number(step)


def _number(value: int) -> bytes:
    return value.to_bytes(_NUMBER_BYTES, "big")
