"""A reduction of four members of which one may sign a wrong result, without a network: what evidence is made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from support.training_swarm import config
from swarm.training.allreduce.committed_slices import committed_tree
from swarm.training.allreduce.leaf_checks import hashed_part, part_leaf, reduced_leaf
from swarm.training.allreduce.parts import ReductionScheme, leaf_at, part_leaves, part_values
from swarm.training.state.certificate import RunSignatures
from swarm_compression import get_codec
from swarm_protocol.hash_tree import HashTree, leaf_digest
from swarm_protocol.identity import Identity
from swarm_protocol.proof_messages import BadSlice, WrongReduction
from swarm_protocol.reduction_messages import AuditedSlice, PartStatement
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


def shown_leaf(peer: Identity, step: int, leaves: list[bytes], leaf: int) -> BadSlice:
    """Return what would show `leaf` of `leaves`, to which `peer` has committed."""
    tree = HashTree.of([leaf_digest(each) for each in leaves])
    commitment = signatures(peer).sign_slices(step, bytes(32), tree.root)
    return BadSlice(
        peer=peer.peer_id,
        step=step,
        state_digest=bytes(32),
        root=commitment.root,
        signature=commitment.signature,
        num_leaves=len(leaves),
        leaf=leaf,
        shown=AuditedSlice(data=leaves[leaf], proof=b"".join(tree.proof(leaf, leaf + 1))),
    )


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
            "run": self.group.run,
            "step": 1,
            "attempt": 0,
            "group_digest": self.signed.digest,
            "part": self.part,
            "result_root": tree.root,
        }
        statement = PartStatement(**{**fields, **changes})  # type: ignore[arg-type]
        return signatures(self.maker, run=statement.run).sign(statement, NOW)

    def evidence(self, result: bytes, index: int = 0) -> WrongReduction:
        """Return what an auditor that has drawn leaf `index` of the part would show."""
        tree, _ = hashed_part(CODEC, self.group, self.part, result)
        leaf = part_leaves(self.group, self.part).start + index
        return WrongReduction(
            group=self.signed.data,
            statement=self.statement(result),
            leaf=leaf,
            result=part_leaf(CODEC, self.group, self.part, result, index),
            result_proof=b"".join(tree.proof(index, index + 1)),
            slices=self.slices(leaf),
        )


def reduced(seed: int = 0, run: str = "run", attempt: int = 0) -> Reduced:
    """Return a reduction of outer step 1, which all signed for this run."""
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


GROUP = reduced().group
