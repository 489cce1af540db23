"""Makes an accusation of an interval in a group of three, which its makers may have made up around a genuine
commitment."""

from __future__ import annotations

from dataclasses import replace

from support.validated_runs import validated
from support.wrong_reduction import IDENTITIES, NOW, NUM_VALUES, reduced, signatures
from swarm.training.allreduce.parts import part_values
from swarm.training.evidence.wrong_interval import draw_leaves, draw_validators
from swarm_protocol.commit_messages import Certificate, Outcome, PlacedSignature
from swarm_protocol.identity import Identity
from swarm_protocol.proof_messages import IntervalFinding, WrongInterval
from swarm_protocol.reduction_messages import AuditedSlice
from swarm_protocol.training_messages import Group

VICTIM, *LIARS = IDENTITIES[1], IDENTITIES[0], IDENTITIES[2]
VALIDATED = validated(validation_rate=0.5)


def accusation(
    voters: tuple[Identity, ...],
    *,
    finders: tuple[Identity, ...] = tuple(LIARS),
    on_probation: tuple[Identity, ...] = (),
    validator: Identity | None = None,
    times: int = 1,
) -> WrongInterval:
    """Return the accusation of VICTIM. Outcomes are tried until one draws `validator`, by default the first of
    `finders`. Each finder signs `times` findings."""
    case, people = reduced(), IDENTITIES[:3]
    new = {each.peer_id for each in on_probation}
    members = tuple(
        replace(member, steps_left=3 if member.peer_id in new else 0) for member in case.group.members[: len(people)]
    )
    group = replace(case.group, members=members, part_values=part_values(NUM_VALUES, (1.0,) * 3))
    signed = signatures(LIARS[0]).sign_group(group, NOW)
    first = (validator or finders[0]).peer_id
    outcome = next(
        found
        for found in (_outcome(signed.digest, number) for number in range(256))
        if draw_validators(group, found, VALIDATED.validation_rate).get(VICTIM.peer_id) == first
    )
    vote = signed.vote(outcome, "commit")
    votes = tuple(
        PlacedSignature(place=people.index(voter), signature=signatures(voter).sign_vote(vote).signature)
        for voter in sorted(voters, key=people.index)
    )
    finding = IntervalFinding(run="run", step=1, attempt=0, origin_digest=outcome.origin_digest, peer=VICTIM.peer_id)
    return WrongInterval(
        certificate=Certificate(group=signed.data, outcome=outcome, votes=votes).to_bytes(),
        peer=VICTIM.peer_id,
        slices=tuple(_slices(group, outcome, first)),
        findings=tuple(signatures(each).sign(finding, NOW + n) for each in finders for n in range(times)),
    )


def _outcome(origin: bytes, number: int) -> Outcome:
    return Outcome(origin_digest=origin, part_digests=(bytes([number]) * 32,) * 3, state_digest=bytes([7]) * 32)


def _slices(group: Group, outcome: Outcome, validator: str) -> list[AuditedSlice]:
    leaves = draw_leaves(group, outcome, VICTIM.peer_id, validator)
    return [reduced().slices(leaf)[IDENTITIES.index(VICTIM)] for leaf in leaves]
