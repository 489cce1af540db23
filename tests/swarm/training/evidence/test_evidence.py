"""Tests that evidence convicts a member that signed a wrong or a second result, and nobody else, at any later time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wrong_reduction import (
    CODEC,
    IDENTITIES,
    NOW,
    NUM_VALUES,
    RUN,
    STRANGER,
    reduced,
    signatures,
    times_minus_ten,
)
from swarm.training.allreduce.parts import leaf_at, num_leaves, part_leaves
from swarm.training.evidence.bans import Verdict
from swarm.training.evidence.evidence import accused, check
from swarm_protocol.errors import IntegrityError, PeerViolation
from swarm_protocol.hash_tree import HashTree, leaf_digest
from swarm_protocol.proof_messages import WRONG_REDUCTION, Evidence, WrongReduction
from swarm_protocol.reduction_messages import AuditedSlice


def verdict(evidence: WrongReduction) -> Verdict:
    return check(Evidence.from_bytes(evidence.evidence().to_bytes()), signatures(), RUN)


def test_wrong_result_convicts_its_signer_for_an_outsider() -> None:
    case = reduced()
    wrong = times_minus_ten(case.result())
    for index in range(len(part_leaves(case.group, 1))):
        found = verdict(case.evidence(wrong, index))
        assert found.peer_id == IDENTITIES[1].peer_id
        assert found.reason == "it signed a wrong result of part 1 of outer step 1"


def test_wrong_result_of_the_backup_convicts_the_backup() -> None:
    case = replace(reduced(), maker=IDENTITIES[2])
    assert verdict(case.evidence(times_minus_ten(case.result()))).peer_id == IDENTITIES[2].peer_id


def test_undecodable_slice_convicts_the_owner_that_signed_its_reduction() -> None:
    case = reduced()
    first = part_leaves(case.group, 1).start
    bad = AuditedSlice(data=bytes([255] * len(case.slices(first)[0].data)))
    encoded = [CODEC.encode(case.vectors[0][leaf_at(NUM_VALUES, leaf)]) for leaf in range(num_leaves(NUM_VALUES))]
    encoded[first] = bad.data
    tree = HashTree.of([leaf_digest(data) for data in encoded])
    member = replace(case.group.members[0], commitment=signatures(IDENTITIES[0]).sign_slices(1, bytes(32), tree.root))
    group = replace(case.group, members=(member, *case.group.members[1:]))
    spoilt = replace(case, signed=signatures(IDENTITIES[0]).sign_group(group, NOW), trees=[tree, *case.trees[1:]])
    evidence = spoilt.evidence(case.result())
    shown = replace(bad, proof=evidence.slices[0].proof)
    assert verdict(replace(evidence, slices=(shown, *evidence.slices[1:]))).peer_id == IDENTITIES[1].peer_id


RIGHT = reduced().result()
WRONG = times_minus_ten(RIGHT)


def with_statement(**changes: object) -> WrongReduction:
    case = reduced()
    return replace(case.evidence(WRONG), statement=case.statement(WRONG, **changes))


def of_stranger() -> WrongReduction:
    return replace(reduced(), maker=STRANGER).evidence(WRONG)


def with_slices_of(seed: int) -> WrongReduction:
    return replace(reduced().evidence(WRONG), slices=reduced(seed).evidence(WRONG).slices)


def with_slice(change: Callable[[AuditedSlice], AuditedSlice]) -> WrongReduction:
    honest = reduced().evidence(WRONG)
    return replace(honest, slices=(change(honest.slices[0]), *honest.slices[1:]))


def uncommitted() -> WrongReduction:
    """Return evidence whose group names roots that their members did not sign: its coordinator could have made them
    up."""
    case = reduced()
    commitment = signatures(STRANGER).sign_slices(1, bytes(32), case.trees[2].root)
    forged = replace(case.group.members[2], commitment=commitment)
    group = replace(case.group, members=(*case.group.members[:2], forged, *case.group.members[3:]))
    return replace(case, signed=signatures(IDENTITIES[0]).sign_group(group, NOW)).evidence(WRONG)


FALSE = {
    "a right result": lambda: reduced().evidence(RIGHT),
    "a result that was not signed": lambda: replace(reduced().evidence(RIGHT), result=reduced().evidence(WRONG).result),
    "a statement about another group": lambda: with_statement(group_digest=bytes(32)),
    "a replayed statement of another attempt": lambda: with_statement(attempt=1),
    "a statement about another part": lambda: with_statement(part=2),
    "a statement about a part that does not exist": lambda: with_statement(part=9),
    "a statement of another run": lambda: with_statement(run="other"),
    "a member that does not make the part": lambda: replace(reduced(), maker=IDENTITIES[3]).evidence(WRONG),
    "a stranger's statement": of_stranger,
    "slices of another round": lambda: with_slices_of(1),
    "a slice too few": lambda: replace(reduced().evidence(WRONG), slices=reduced().evidence(WRONG).slices[1:]),
    "a changed slice": lambda: with_slice(lambda each: replace(each, data=each.data[:-1] + b"\x01")),
    "a slice without proof": lambda: with_slice(lambda each: replace(each, proof=b"")),
    "a slice with a longer proof": lambda: with_slice(lambda each: replace(each, proof=each.proof + bytes(32))),
    "commitments that the members did not sign": uncommitted,
    "a leaf of another part": lambda: replace(reduced().evidence(WRONG), leaf=0),
    "no slices": lambda: replace(reduced().evidence(WRONG), slices=()),
    "another run's group": lambda: reduced(run="other").evidence(WRONG),
}


@pytest.mark.parametrize("what", FALSE)
def test_evidence_convicts_nobody_when_it_proves_nothing(what: str) -> None:
    with pytest.raises((PeerViolation, IntegrityError)):
        verdict(FALSE[what]())


def test_evidence_counts_only_in_its_own_run_and_network() -> None:
    evidence = reduced().evidence(WRONG)
    assert check(evidence.evidence(), signatures(), RUN).peer_id == IDENTITIES[1].peer_id
    for foreign in (signatures(run="other"), signatures(network="other")):
        with pytest.raises((PeerViolation, IntegrityError)):
            check(evidence.evidence(), foreign, RUN)


def test_evidence_of_an_unknown_kind_convicts_nobody() -> None:
    evidence = replace(reduced().evidence(WRONG).evidence(), kind="bad_manners")
    with pytest.raises(PeerViolation, match="bad_manners"):
        check(evidence, signatures(), RUN)


def test_accused_peer_is_known_before_evidence_is_checked() -> None:
    """Evidence against a member that is banned already therefore costs no check."""
    body = reduced().evidence(RIGHT).to_bytes()
    assert accused(Evidence(kind=WRONG_REDUCTION, body=body), signatures()) == (IDENTITIES[1].peer_id, 1)


@settings(max_examples=60)
@given(st.integers(0, 10**9), st.integers(1, 255))
def test_evidence_convicts_nobody_else_when_any_byte_is_changed_or_cut(place: int, flip: int) -> None:
    whole = reduced().evidence(WRONG).evidence().to_bytes()
    at = place % len(whole)
    for data in (whole[:at], whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :]):
        try:
            found = check(Evidence.from_bytes(data), signatures(), RUN)
        except (PeerViolation, IntegrityError):
            continue
        assert found.peer_id == IDENTITIES[1].peer_id


def test_honest_owner_is_convicted_by_no_evidence_that_other_members_can_make() -> None:
    """All others together may choose the group, weights, slices and leaf. The owner has signed only its own result."""
    chance = random.Random(0)
    for seed in range(20):
        case = reduced(seed)
        honest = case.evidence(case.result(), chance.randrange(len(part_leaves(case.group, 1))))
        others = [reduced(each) for each in (seed + 1, seed + 2)]
        for lie in (
            replace(honest, slices=others[0].slices(honest.leaf)),
            replace(honest, group=others[1].signed.data),
            replace(honest, leaf=honest.leaf + 1),
            replace(honest, result=bytes(len(honest.result))),
            replace(others[0].evidence(WRONG), statement=honest.statement),
        ):
            with pytest.raises((PeerViolation, IntegrityError)):
                verdict(lie)
