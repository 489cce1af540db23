from __future__ import annotations

import numpy as np
import pytest
import torch
from swarm.serving.sampling.logit_edits import LogitEdits
from swarm.serving.sampling.sampling import Pick, Sampling, pick, pick_all
from swarm_protocol.sampler import Sampler
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

VOCAB = 40
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 3


def ids(*token_ids: int) -> bytes:
    return np.array(token_ids, dtype="<i4").tobytes()


def test_repetition_penalty_is_transformers_own_over_prompt_and_answer() -> None:
    sampler = Sampler(repetition_penalty=1.7, prompt_ids=ids(3, 4))
    edited = LogitEdits(sampler=sampler, counts={4: 2, 9: 1}).apply(LOGITS)
    seen = torch.tensor([[3, 4, 4, 4, 9]])
    assert torch.equal(edited, RepetitionPenaltyLogitsProcessor(1.7)(seen, LOGITS[None].clone())[0])


def test_presence_and_frequency_penalties_are_openais_formula() -> None:
    sampler = Sampler(presence_penalty=0.5, frequency_penalty=-0.25, prompt_ids=ids(1))
    edited = LogitEdits(sampler=sampler, counts={4: 3, 9: 1}).apply(LOGITS)
    expected = LOGITS.clone()
    expected[4] -= 0.5 - 0.25 * 3
    expected[9] -= 0.5 - 0.25
    assert torch.equal(edited, expected)


def test_bias_is_added_and_what_may_not_come_never_does() -> None:
    sampler = Sampler(bias_ids=(7, 8), bias_values=(100.0, -100.0))
    edited = LogitEdits(sampler=sampler, banned=(7,)).apply(LOGITS)
    assert edited[7] == -torch.inf
    assert edited[8] == LOGITS[8] - 100
    only = LogitEdits(sampler=Sampler(), allowed=bytes([0, 0b100, 0, 0, 0])).apply(LOGITS)
    assert only.isfinite().nonzero().flatten().tolist() == [10]
    assert LOGITS.isfinite().all(), "the model's own logits are left as they are"


def test_edited_draws_keep_to_what_is_left_and_probabilities_to_the_model() -> None:
    edits = LogitEdits(sampler=Sampler(), allowed=bytes([0b1110, 0, 0, 0, 0]))
    for temperature in (0.0, 1.5):
        picks = [
            Pick(sampling=Sampling(temperature=temperature, seed=3), index=index, num_logprobs=1, edits=edits)
            for index in range(30)
        ]
        found = pick_all([LOGITS] * 30, picks)
        assert {picked.token_id for picked in found if picked} <= {1, 2, 3}
        for picked in found:
            assert picked is not None
            assert picked.logprob == pytest.approx(float(LOGITS.log_softmax(0)[picked.token_id]))


def test_draw_where_nothing_is_left_finds_no_token() -> None:
    logits = torch.tensor([1.0, -torch.inf])
    edits = LogitEdits(sampler=Sampler(), allowed=bytes([0b10]))
    assert pick_all([logits], [Pick(sampling=Sampling(), index=0, edits=edits)]) == [None]


@pytest.mark.parametrize("temperature", [0.5, 1.3])
def test_min_p_keeps_what_transformers_keeps(temperature: float) -> None:
    kept = MinPLogitsWarper(0.1)(torch.empty(1, 0), LOGITS[None] / temperature)[0].isfinite().nonzero().flatten()
    sampling = Sampling(temperature=temperature, min_p=0.1, seed=5)
    drawn = {pick(LOGITS, sampling, index) for index in range(2000)}
    assert drawn <= set(kept.tolist())
    assert len(drawn) >= len(kept) - 1, "and all of it"
    assert pick(LOGITS, Sampling(temperature=1.0, min_p=1.0, seed=5), 3) == int(LOGITS.argmax())
