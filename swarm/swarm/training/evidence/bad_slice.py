"""Evidence that a member has committed to a slice that nobody can decode: one leaf of it, with its path to the root
that the member signed.

No honest member can be convicted. It decodes every frame as its receivers do before it commits to it
(`made_part.committed_tree`), and the leaves of a frame that can be decoded can be decoded. Neither the leaf's place nor
the number of leaves is believed, since the member did not sign them: bytes count as bad if no number of values makes
them an encoding, so they are in no honest member's tree at any place. A tree's inner nodes cannot be shown as leaves
(`hash_tree`). This is void if two machines disagree on which bytes are an encoding; the codecs are tested for that.
"""

from __future__ import annotations

from swarm_compression import get_codec
from swarm_protocol.errors import PeerViolation
from swarm_protocol.identity import verify
from swarm_protocol.proof_messages import BadSlice
from swarm_protocol.round_signatures import slices_message

from swarm.training.allreduce.bad_slices import is_encoding
from swarm.training.allreduce.leaf_checks import is_leaf
from swarm.training.run.run_config import RunConfig
from swarm.training.state.certificate import RunSignatures


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
