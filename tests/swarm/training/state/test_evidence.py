"""Evidence convicts a member that signed a wrong or a second result, and nobody else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.training_swarm import config
from swarm.training.allreduce.leaf_checks import hashed_part, part_leaf, reduced_leaf
from swarm.training.allreduce.made_part import committed_tree
from swarm.training.allreduce.parts import ReductionScheme, leaf_at, num_leaves, part_leaves, part_values
from swarm.training.state.certificate import RunSignatures
from swarm.training.state.evidence import Verdict, check
from swarm_compression import get_codec
from swarm_protocol.errors import IntegrityError, PeerViolation
from swarm_protocol.hash_tree import HashTree, leaf_digest
from swarm_protocol.identity import Identity
from swarm_protocol.proof_messages import AuditedSlice, Evidence, PartStatement
from swarm_protocol.training_messages import Contribution, Group, SignedGroup
from torch import Tensor

NOW = 1_800_000_000.0
NUM_VALUES = 3000
CODEC = get_codec("int8")
RUN = config(aggregator="centered_clip")
IDENTITIES = sorted((Identity(bytes([number]) * 32) for number in range(1, 5)), key=lambda each: each.peer_id)
STRANGER = Identity(b"s" * 32)


def signatures(identity: Identity = STRANGER, run: str = "run", network: str = "test") -> RunSignatures:
    return RunSignatures(identity=identity, network_id=network, run=run)


@dataclass
class Reduced:
    """A group of four and what its members sent; `part` is the one that is made, by `maker`."""

    signed: SignedGroup
    vectors: list[Tensor]
    trees: list[HashTree]
    part: int = 1
    maker: Identity = IDENTITIES[1]

    @property
    def group(self) -> Group:
        return self.signed.group

    def slices(self, leaf: int) -> tuple[AuditedSlice, ...]:
        place = leaf_at(NUM_VALUES, leaf)
        return tuple(
            AuditedSlice(data=CODEC.encode(vector_N[place]), proof=b"".join(tree.proof(leaf, leaf + 1)))
            for vector_N, tree in zip(self.vectors, self.trees, strict=True)
        )

    def result(self) -> bytes:
        """Return the right result of the part, which is one frame."""
        scheme = ReductionScheme(codec=CODEC, aggregator=RUN.aggregator_for(4))
        values = []
        for leaf in part_leaves(self.group, self.part):
            data, place = reduced_leaf(self.group, scheme, leaf, self.slices(leaf)), leaf_at(NUM_VALUES, leaf)
            assert data is not None
            values.append(CODEC.decode(data, place.stop - place.start))
        return CODEC.encode(torch.cat(values))

    def statement(self, result: bytes, **changes: object) -> bytes:
        tree, _ = hashed_part(CODEC, self.group, self.part, result)
        fields: dict[str, object] = {
            "run": "run",
            "step": 1,
            "attempt": 0,
            "group_digest": self.signed.digest,
            "part": self.part,
            "result_root": tree.root,
        }
        statement = PartStatement(**{**fields, **changes})  # type: ignore[arg-type]
        return signatures(self.maker, run=statement.run).sign_part(statement, NOW)

    def evidence(self, result: bytes, index: int = 0) -> Evidence:
        """Return what an auditor that has drawn leaf `index` of the part would show."""
        tree, _ = hashed_part(CODEC, self.group, self.part, result)
        leaf = part_leaves(self.group, self.part).start + index
        return Evidence(
            group=self.signed.data,
            statement=self.statement(result),
            leaf=leaf,
            result=part_leaf(CODEC, self.group, self.part, result, index),
            result_proof=b"".join(tree.proof(index, index + 1)),
            slices=self.slices(leaf),
        )


def reduced(seed: int = 0, run: str = "run", attempt: int = 0) -> Reduced:
    generator = torch.Generator().manual_seed(seed)
    vectors = [torch.randn(NUM_VALUES, generator=generator) for _ in IDENTITIES]
    trees = [committed_tree(lambda frame, x_N=x_N: CODEC.encode(x_N[frame]), CODEC, NUM_VALUES) for x_N in vectors]  # type: ignore[misc]
    members = tuple(
        Contribution(
            peer_id=identity.peer_id,
            num_tokens=4 + index,
            num_samples=1,
            commitment=signatures(identity, run=run).sign_slices(1, bytes(32), tree.root),
        )
        for index, (identity, tree) in enumerate(zip(IDENTITIES, trees, strict=True))
    )
    group = Group(
        run=run,
        step=1,
        attempt=attempt,
        state_digest=bytes(32),
        members=members,
        part_values=part_values(NUM_VALUES, (1.0,) * 4),
        reduce_s=10.0,
        vote_s=10.0,
    )
    signed = signatures(IDENTITIES[0], run=run).sign_group(group, NOW)
    return Reduced(signed=signed, vectors=vectors, trees=trees)


def times_minus_ten(result: bytes, part: int = 1) -> bytes:
    return CODEC.encode(-10 * CODEC.decode(result, reduced().group.part_values[part]))


def verdict(evidence: Evidence) -> Verdict:
    return check(Evidence.from_bytes(evidence.to_bytes()), signatures(), RUN, NOW + 60)


def test_wrong_result_convicts_its_signer_for_somebody_who_was_not_there() -> None:
    case = reduced()
    wrong = times_minus_ten(case.result())
    for index in range(len(part_leaves(case.group, 1))):
        found = verdict(case.evidence(wrong, index))
        assert found.peer_id == IDENTITIES[1].peer_id
        assert found.reason == "it signed a wrong result of part 1 of outer step 1"


def test_wrong_result_of_the_backup_convicts_the_backup() -> None:
    case = replace(reduced(), maker=IDENTITIES[2])
    assert verdict(case.evidence(times_minus_ten(case.result()))).peer_id == IDENTITIES[2].peer_id


def test_slice_that_nobody_can_decode_convicts_who_says_that_it_reduced_it() -> None:
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


def with_statement(**changes: object) -> Evidence:
    case = reduced()
    return replace(case.evidence(WRONG), statement=case.statement(WRONG, **changes))


def of_stranger() -> Evidence:
    return replace(reduced(), maker=STRANGER).evidence(WRONG)


def with_slices_of(seed: int) -> Evidence:
    return replace(reduced().evidence(WRONG), slices=reduced(seed).evidence(WRONG).slices)


def with_slice(change: Callable[[AuditedSlice], AuditedSlice]) -> Evidence:
    honest = reduced().evidence(WRONG)
    return replace(honest, slices=(change(honest.slices[0]), *honest.slices[1:]))


def uncommitted() -> Evidence:
    """The group names roots that their members did not sign: its coordinator could make them up."""
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
def test_evidence_that_proves_nothing_convicts_nobody(what: str) -> None:
    with pytest.raises((PeerViolation, IntegrityError)):
        verdict(FALSE[what]())


def test_evidence_counts_in_its_own_run_and_network_only() -> None:
    evidence = reduced().evidence(WRONG)
    assert check(evidence, signatures(), RUN, NOW).peer_id == IDENTITIES[1].peer_id
    for foreign in (signatures(run="other"), signatures(network="other")):
        with pytest.raises((PeerViolation, IntegrityError)):
            check(evidence, foreign, RUN, NOW)


@settings(max_examples=60)
@given(st.integers(0, 10**9), st.integers(1, 255))
def test_evidence_with_any_byte_changed_or_cut_convicts_nobody_else(place: int, flip: int) -> None:
    whole = reduced().evidence(WRONG).to_bytes()
    at = place % len(whole)
    for data in (whole[:at], whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :]):
        try:
            found = check(Evidence.from_bytes(data), signatures(), RUN, NOW)
        except (PeerViolation, IntegrityError):
            continue
        assert found.peer_id == IDENTITIES[1].peer_id


def test_honest_owner_is_convicted_by_nothing_that_other_members_can_show() -> None:
    """All others together may choose group, weights, slices and leaf; the owner has signed only what it made."""
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
