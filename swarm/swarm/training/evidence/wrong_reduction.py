"""Evidence of lies in a reduction: a result that is wrong, and a slice that nobody can decode.

A result is wrong if an owner (or the backup that stood in for it) signed it and a leaf of it does not follow from the
slices to which the group's contributors had committed. Who signs two results of a part has signed a wrong one. No
honest member can be convicted. It signs a statement only for a group that it accepted, by the digest of that very
group, and only after it has compared all slices with the committed roots; of these it computes the same bytes as
everybody who checks. This is void if two machines compute different bytes from equal slices: the aggregators and codecs
are tested for that.

A bad slice is one leaf of what a member has committed to, with its path to the root that the member signed. No honest
member can be convicted of that either. It decodes every frame as its receivers do before it commits to it
(`committed_tree`), and the leaves of a frame that can be decoded can be decoded. Neither the leaf's place nor
the number of leaves is believed, since the member did not sign them: bytes count as bad if no number of values makes
them an encoding, so they are in no honest member's tree at any place. A tree's inner nodes cannot be shown as leaves
(`hash_tree`). This is void if two machines disagree on which bytes are an encoding; the codecs are tested for that.
"""

from __future__ import annotations

from swarm_compression import get_codec
from swarm_protocol.envelope import issued_at
from swarm_protocol.errors import PeerViolation
from swarm_protocol.identity import verify
from swarm_protocol.proof_messages import BadSlice, WrongReduction, slices_message
from swarm_protocol.reduction_messages import PartStatement
from swarm_protocol.training_messages import SignedGroup

from swarm.training.allreduce.committed_slices import are_committed, is_encoding, is_leaf
from swarm.training.allreduce.leaf_checks import reduced_leaf
from swarm.training.allreduce.parts import ReductionScheme, backup_peer, part_leaves
from swarm.training.run.run_config import RunConfig
from swarm.training.state.certificate import RunSignatures


def accused_of(body: bytes, signatures: RunSignatures) -> tuple[str, int]:
    """Return whom the evidence is against, and the step: who signed its statement. Raises PeerViolation or
    IntegrityError."""
    data = WrongReduction.from_bytes(body).statement
    signer, statement = signatures.read_part(data, issued_at(data))
    return signer, statement.step


def check_reduction(body: bytes, signatures: RunSignatures, config: RunConfig) -> str:
    """Return in words what the signer of the statement in `body` has done wrong. Blocks for about a millisecond a
    member. Raises PeerViolation or IntegrityError if it proves nothing."""
    evidence = WrongReduction.from_bytes(body)
    signed = signatures.read_group(evidence.group, issued_at(evidence.group))
    signer, statement = signatures.read_part(evidence.statement, issued_at(evidence.statement))
    _check_maker(signed, signer, statement)
    signatures.check_commitments(signed)
    group, leaves = signed.group, part_leaves(signed.group, statement.part)
    if evidence.leaf not in leaves:
        raise PeerViolation("evidence is of a leaf outside the part")
    index = evidence.leaf - leaves.start
    if not is_leaf(statement.result_root, len(leaves), index, evidence.result, evidence.result_proof):
        raise PeerViolation("evidence has a result that its owner did not sign")
    if not are_committed(group, evidence.leaf, evidence.slices):
        raise PeerViolation("evidence has slices that nobody committed to")
    codec, aggregator = get_codec(config.codec), config.aggregator_for(len(group.contributors))
    scheme = ReductionScheme(codec=codec, aggregator=aggregator, probation=config.probation)
    if reduced_leaf(group, scheme, evidence.leaf, evidence.slices) == evidence.result:
        raise PeerViolation("evidence shows a result that is right")
    return f"it signed a wrong result of part {statement.part} of outer step {group.step}"


def _check_maker(signed: SignedGroup, signer: str, statement: PartStatement) -> None:
    """Raises PeerViolation unless `signer` may state what it has made of that part of the group."""
    group = signed.group
    is_of_group = (statement.step, statement.attempt) == (group.step, group.attempt)
    if statement.group_digest != signed.digest or not is_of_group or not group.part_values:
        raise PeerViolation("evidence has a statement about another group")
    if statement.part >= len(group.members) or not group.part_values[statement.part]:
        raise PeerViolation("the statement names a part that does not exist")
    if signer not in (group.peer_ids[statement.part], backup_peer(group, statement.part)):
        raise PeerViolation("evidence has a statement of a member that does not make the part")


def accused_of_bad_slice(body: bytes, signatures: RunSignatures) -> tuple[str, int]:  # noqa: ARG001
    """Return whom the evidence is against, and the step. Nothing is verified. Raises PeerViolation."""
    case = BadSlice.from_bytes(body)
    return case.peer, case.step


def check_bad_slice(body: bytes, signatures: RunSignatures, config: RunConfig) -> str:
    """Return in words what the member in `body` has committed to. Blocks for a millisecond at most. Raises
    PeerViolation or IntegrityError if it proves nothing."""
    case = BadSlice.from_bytes(body)
    message = slices_message(signatures.network_id, signatures.run, case.step, case.state_digest, case.root)
    verify(case.peer, message, case.signature)
    if not is_leaf(case.root, case.num_leaves, case.leaf, case.shown.data, case.shown.proof):
        raise PeerViolation("evidence has a slice that its sender did not commit to")
    if is_encoding(get_codec(config.codec), case.shown.data):
        raise PeerViolation("evidence has a slice that can be decoded")
    return f"it committed to a slice that nobody can decode, at outer step {case.step}"
