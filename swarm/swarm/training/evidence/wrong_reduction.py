"""Evidence of lies in a reduction: a wrong result, and a slice that cannot be decoded.

A result is wrong if an owner, or the backup owner, signed it and one of its leaves does not follow from the slices to
which the group's contributors committed. Of two different signed results of a part, one is wrong. No honest member can
be convicted. It signs a statement only for a group that it accepted, by that group's digest, and only after it compared
all slices with the committed roots. From these slices it computes the same bytes as everybody who checks. This is void
if two machines compute different bytes from equal slices: the aggregators and codecs are tested for that.

A bad slice is one leaf that a member committed to, with its path to the root that the member signed. No honest member
can be convicted of this either. Before it commits to a frame it decodes it as its receivers do (`committed_tree`), and
if a frame can be decoded, so can its leaves. The leaf's place and the number of leaves are not trusted, since the
member did not sign them: bytes are bad only if they are no encoding of any number of values, so no honest member's tree
has them at any place. A tree's inner nodes cannot be shown as leaves (`hash_tree`). This is void if two machines
disagree on which bytes are an encoding; the codecs are tested for that.
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
    """Return the accused, who signed the statement, and the step. Raises PeerViolation or IntegrityError."""
    data = WrongReduction.from_bytes(body).statement
    signer, statement = signatures.read(PartStatement, data, issued_at(data))
    return signer, statement.step


def check_reduction(body: bytes, signatures: RunSignatures, config: RunConfig) -> str:
    """Return in words the lie of the statement's signer. Blocks for about a millisecond per member. Raises
    PeerViolation or IntegrityError if it proves nothing."""
    evidence = WrongReduction.from_bytes(body)
    signed = signatures.read_group(evidence.group, issued_at(evidence.group))
    signer, statement = signatures.read(PartStatement, evidence.statement, issued_at(evidence.statement))
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
    """Raises PeerViolation unless `signer` is the owner or backup owner of the statement's part in this group."""
    group = signed.group
    is_of_group = (statement.step, statement.attempt) == (group.step, group.attempt)
    if statement.group_digest != signed.digest or not is_of_group or not group.part_values:
        raise PeerViolation("evidence has a statement about another group")
    if statement.part >= len(group.members) or not group.part_values[statement.part]:
        raise PeerViolation("the statement names a part that does not exist")
    if signer not in (group.peer_ids[statement.part], backup_peer(group, statement.part)):
        raise PeerViolation("evidence has a statement of a member that does not make the part")


def accused_of_bad_slice(body: bytes, signatures: RunSignatures) -> tuple[str, int]:  # noqa: ARG001
    """Return the accused and the step, unverified. Raises PeerViolation."""
    case = BadSlice.from_bytes(body)
    return case.peer, case.step


def check_bad_slice(body: bytes, signatures: RunSignatures, config: RunConfig) -> str:
    """Return in words the lie of the member in `body`. Blocks for a millisecond at most. Raises PeerViolation or
    IntegrityError if it proves nothing."""
    case = BadSlice.from_bytes(body)
    message = slices_message(signatures.network_id, signatures.run, case.step, case.state_digest, case.root)
    verify(case.peer, message, case.signature)
    if not is_leaf(case.root, case.num_leaves, case.leaf, case.shown.data, case.shown.proof):
        raise PeerViolation("evidence has a slice that its sender did not commit to")
    if is_encoding(get_codec(config.codec), case.shown.data):
        raise PeerViolation("evidence has a slice that can be decoded")
    return f"it committed to a slice that cannot be decoded, at outer step {case.step}"
