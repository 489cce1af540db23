"""Recomputes the span that evidence shows, from the model's own files, and decides whether its server sent something
else.

A reader of evidence has no second server to ask and trusts nobody, and whoever made the evidence may have chosen the
inputs. So a server is found wrong only if three things hold. Every file of the model is the published one. The error of
the outputs is more than MARGIN times what honest servers may differ by. It is also more than STEADINESS times the
change that rounding the inputs causes, since for some inputs rounding alone changes everything. The functions block for
twice the time of the span.

Shapes: T positions, H hidden size, V vocabulary, N draws, K largest logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from swarm_protocol.errors import ConfigError, PeerViolation
from swarm_protocol.served_evidence_messages import AnswerCommitment, ServedEvidence
from torch import Tensor

from swarm.serving.checking.comparison import (
    TOLERANCES,
    Floats,
    LargestLogits,
    Tolerance,
    compare_draws,
    compare_rows,
    decoded_rows,
    fingerprint_error,
)
from swarm.serving.checking.finished_answer import AnsweredSpan, Draw, FinishedAnswer
from swarm.serving.checking.span_check import NUM_TOP
from swarm.serving.checking.span_commitment import answer_of, signed_by
from swarm.serving.manifest.verification import check_directory
from swarm.serving.model.model_files import ModelFiles, open_model
from swarm.serving.model.shape import ModelShape
from swarm.serving.model.span import Span
from swarm.serving.model.span_loading import load_span
from swarm.serving.server.deployment import DTYPES, Dtype, ServerOptions
from swarm.serving.wire.tensor_stream import check_ids

MARGIN = 2.0
"""Minimum error, in multiples of what honest servers may differ by. A client's own check, which convinces only that
client, requires more than 1."""

STEADINESS = 16.0
"""Minimum error, in multiples of the effect of rounding the inputs: an honest server rounds after each product, too,
which has a several times larger effect."""

MAX_INPUT = 1e9
"""Maximum magnitude of inputs, far above any activation. The squares of much larger inputs overflow in some
implementations of a norm only, and then honest servers differ completely."""

ROUNDING: dict[str, float] = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-9}
"""The largest relative error of rounding to a dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongAnswer:
    """`peer_id` signed outputs of blocks `[start, end)` of `model` that do not follow from its inputs."""

    peer_id: str
    model: str
    start: int
    end: int
    reason: str


def replay_answer(evidence: ServedEvidence, network_id: str, directory: Path) -> WrongAnswer:
    """Return what the evidence, which is from this network, proves with the published model in `directory`.

    Raises ConfigError or IntegrityError if `directory` does not hold the model in question, and PeerViolation if the
    evidence proves nothing.
    """
    _, stated = signed_by(evidence.commitment, network_id)
    files, dtype = _files_of(stated, directory)
    model = ModelShape(
        name=stated.model,
        revision=files.revision(dtype),
        num_blocks=files.num_blocks,
        hidden_size=files.hidden_size,
        vocab_size=files.vocab_size,
    )
    answer = answer_of(evidence, network_id, model)
    (shown,) = answer.spans
    options = ServerOptions(dtype=dtype)
    start, end = shown.start, shown.end
    span = load_span(files, start, end, dtype=options.compute_dtype, bits=options.bits)
    share, what = _compare(answer, shown, span, dtype)
    reason = f"{what} of blocks {start}:{end} differs by {share:.1f} times the tolerance"
    return WrongAnswer(peer_id=shown.peer_id, model=model.name, start=start, end=end, reason=reason)


def _files_of(stated: AnswerCommitment, directory: Path) -> tuple[ModelFiles, Dtype]:
    """Return the model's files and the kind of weights that the server announced."""
    files = open_model(directory)
    published = files.manifest
    if published is None:
        raise ConfigError(
            f"{directory} holds no signed manifest, so that nothing says which model {stated.model} is",
            remedy="name the directory of the published model, with its swarm-model.manifest",
        )
    dtype = next((kind for kind in DTYPES if files.revision(kind) == stated.revision), None)
    if published.manifest.name != stated.model or dtype is None:
        raise ConfigError(
            f"{directory} is another model than {stated.model} in revision {stated.revision}, which the evidence is of",
            remedy="name the directory of that model",
        )
    check_directory(directory, published, lambda _num_bytes: None)
    return files, dtype


def _compare(answer: FinishedAnswer, asked: AnsweredSpan, span: Span, dtype: Dtype) -> tuple[float, str]:
    """Return the error of the outputs in multiples of the tolerance, and which outputs are meant. Raises PeerViolation
    if it proves nothing."""
    tolerance = TOLERANCES[dtype].after(asked.end - asked.start).with_codec(answer.codec)
    x = _inputs(answer, asked, span)
    rounding = ROUNDING[str(span.dtype).removeprefix("torch.")]
    moved = x * (1 + rounding * (2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) - 1))
    plain, other = (_computed(span, each, len(asked.draws)) for each in (x, moved))
    if asked.draws:
        found = compare_draws(asked.draws, _largest(plain), tolerance, has_plain_draws=False)
        noise = _noise_of_draws(asked.draws, plain, other, tolerance)
    else:
        given = decoded_rows(asked.outputs, answer.codec, answer.model.hidden_size)
        expected, near = plain[asked.outputs_from :], other[asked.outputs_from :]
        found = compare_rows(given[: len(expected)], expected, tolerance)
        noise = compare_rows(near, expected, tolerance).share
    if found.share <= max(MARGIN, STEADINESS * noise):
        raise PeerViolation(
            f"evidence shows outputs that an honest server may give: {found.what} differs by {found.share:.2f} times "
            f"the tolerance, and by {noise:.2f} for a rounding of the inputs",
            peer_id=asked.peer_id,
        )
    return found.share, found.what


def _inputs(answer: FinishedAnswer, asked: AnsweredSpan, span: Span) -> Tensor:
    """Return the inputs as hidden states or embeddings [T, H], float32."""
    if asked.start:
        rows = decoded_rows(asked.inputs, answer.codec, answer.model.hidden_size)
        if not np.abs(rows).max() <= MAX_INPUT:
            raise PeerViolation("evidence has inputs that no model computes with", peer_id=asked.peer_id)
        return torch.from_numpy(rows).float()
    ids_T = np.frombuffer(asked.inputs, dtype="<i4").astype(np.int64)
    check_ids(ids_T, answer.model.vocab_size)
    return span.embed(torch.from_numpy(ids_T)).float()


@torch.inference_mode()
def _computed(span: Span, x_TH: Tensor, num_draws: int) -> Floats:
    """Return hidden states [T, H], or the logits [N, V] of the draws."""
    is_last = span.end == span.num_blocks
    (rows,) = span.forward(x_TH[None], span.start, span.end, head=is_last, num_last=num_draws if is_last else 0)
    found: Floats = rows.float().cpu().numpy().astype(np.float64)
    if not np.isfinite(found).all():
        raise PeerViolation("evidence has inputs of which the model makes no finite numbers")
    return found


def _largest(logits_NV: Floats) -> list[LargestLogits]:
    found = []
    for row in logits_NV:
        ids_K = np.argsort(-row, kind="stable")[:NUM_TOP]
        log_sum = float(np.logaddexp.reduce(row))
        found.append(LargestLogits(values_K=row[ids_K], ids_K=ids_K.astype(np.int64), log_sum=log_sum))
    return found


def _noise_of_draws(draws: Sequence[Draw], plain_NV: Floats, other_NV: Floats, tolerance: Tolerance) -> float:
    """Return how far the fingerprints of the draws are apart in two computations, as a multiple of the tolerance."""
    errors = []
    for each, row, largest in zip(draws, other_NV, _largest(plain_NV), strict=True):
        if num := len(each.token.fingerprint) // 8:
            ids_K = np.argsort(-row, kind="stable")[:num]
            data = ids_K.astype("<i4").tobytes() + row[ids_K].astype("<f4").tobytes()
            errors.append(fingerprint_error(data, largest))
    return float(np.median(errors)) / tolerance.fingerprint if errors else 0.0
