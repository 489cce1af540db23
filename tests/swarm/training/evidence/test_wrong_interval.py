"""Tests that evidence about an interval convicts by the findings of enough deciding members, and never by a made-up
group."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.made_up_interval import LIARS, VALIDATED, VICTIM, accusation
from support.wrong_reduction import CODEC, IDENTITIES, NUM_VALUES, reduced, signatures
from swarm.training.allreduce.parts import leaf_at, num_leaves
from swarm.training.evidence.wrong_interval import IntervalCase, check_interval, check_slices, read_case
from swarm_protocol.errors import PeerViolation
from swarm_protocol.hash_tree import HashTree, leaf_digest
from swarm_protocol.identity import Identity
from swarm_protocol.proof_messages import WrongInterval
from swarm_protocol.reduction_messages import AuditedSlice


def read(evidence: WrongInterval) -> IntervalCase:
    return read_case(evidence.to_bytes(), signatures(), VALIDATED)


def test_group_that_two_keys_made_up_around_a_genuine_commitment_convicts_nobody() -> None:
    evidence = accusation(tuple(LIARS), on_probation=(VICTIM,))
    assert read(evidence).is_enough("somebody"), "the evidence must lack only the vote of the accused"
    with pytest.raises(PeerViolation, match="no vote of the accused"):
        check_interval(evidence.to_bytes(), signatures(), VALIDATED)


def test_vote_of_the_accused_proves_that_the_group_is_genuine() -> None:
    evidence = accusation((VICTIM, *LIARS))
    assert "does not follow from its interval" in check_interval(evidence.to_bytes(), signatures(), VALIDATED)


@pytest.mark.parametrize(("on_probation", "is_enough"), [((), True), ((LIARS[0],), False), (tuple(LIARS), False)])
def test_findings_of_members_on_probation_do_not_count(on_probation: tuple[Identity, ...], is_enough: bool) -> None:
    case = read(accusation((VICTIM, *LIARS), on_probation=on_probation))
    assert len(case.finders) == 2
    assert case.is_enough("somebody") == is_enough


def test_second_finding_of_a_member_does_not_keep_out_findings_of_others() -> None:
    one, other = (accusation((VICTIM, *LIARS), finders=finders) for finders in (LIARS[:1], LIARS))
    again = accusation((VICTIM, *LIARS), finders=LIARS[:1], times=2)
    case = read(one)
    second = read(replace(other, findings=(again.findings[1], other.findings[1])))
    assert second.evidence.findings[0] != case.evidence.findings[0]
    merged = case.with_findings_of(second)
    assert merged.finders == tuple(each.peer_id for each in LIARS)
    assert read(merged.evidence).is_enough("somebody")


def test_committed_slice_is_refused_when_nobody_can_decode_it() -> None:
    case, leaf = reduced(), 0
    data = [CODEC.encode(case.vectors[1][leaf_at(NUM_VALUES, each)]) for each in range(num_leaves(NUM_VALUES))]
    data[leaf] = bytes([255] * len(data[leaf]))
    tree = HashTree.of([leaf_digest(each) for each in data])
    commitment = signatures(VICTIM).sign_slices(1, bytes(32), tree.root)
    member = replace(case.group.members[IDENTITIES.index(VICTIM)], commitment=commitment)
    shown = AuditedSlice(data=data[leaf], proof=b"".join(tree.proof(leaf, leaf + 1)))
    with pytest.raises(PeerViolation, match="nobody can decode"):
        check_slices(case.group, CODEC, member, [leaf], [shown])
