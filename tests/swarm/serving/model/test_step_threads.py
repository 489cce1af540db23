"""How many threads a step gets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from swarm.serving.model.batch import Batch, SequenceRows, Want
from swarm.serving.model.model_files import open_model
from swarm.serving.model.span_loading import load_span
from swarm.serving.model.step_threads import threads, worthwhile


@pytest.mark.parametrize(
    ("times_ms", "chosen"),
    [
        ({1: 10.0}, 1),
        ({1: 10.0, 2: 8.5}, 1),  # a second core for less than a fifth
        ({1: 10.0, 2: 7.5}, 2),
        ({1: 16.0, 2: 8.0, 4: 4.0, 6: 3.6}, 4),
        ({1: 16.0, 2: 8.0, 4: 4.0, 6: 2.5}, 6),
        ({1: 8.0, 2: 9.0, 4: 5.0}, 4),  # a fifth for each of two doublings
        ({1: 9.0, 2: 8.0, 3: 5.8}, 3),
        ({1: 8.0, 2: 9.0, 4: 5.5, 8: 0.1}, 1),  # no hope after two that are not worth it
    ],
)
def test_worthwhile_is_where_a_doubling_no_longer_saves_a_fifth(times_ms: Mapping[int, float], chosen: int) -> None:
    assert worthwhile(times_ms.__getitem__, max(times_ms)) == chosen


def test_run_steps_with_the_threads_found_for_their_like(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        span = load_span(open_model(llama_dir), 2, 4)
        span.step_threads = {1: 1, 16: 3}
        seen = []
        for name in ("run_fused", "run_ragged"):
            run = getattr(span, name)
            monkeypatch.setattr(
                span, name, lambda *args, run=run: (seen.append(torch.get_num_threads()), run(*args))[1]
            )
        for num_rows in (1, 7, 8, 32, 33):
            x = torch.zeros(num_rows, span.hidden_size)
            piece = SequenceRows(num_tokens=num_rows, position=0, pages=range(8), want=Want.NOTHING)
            span.run(Batch(x=x, pieces=(piece,), start=2, end=4), span.new_pool(8))
            assert torch.get_num_threads() == 2
        assert seen == [1, 1, 3, 3, 2]
    finally:
        torch.set_num_threads(before)


def test_threads_are_as_before_also_after_a_failure() -> None:
    usual = torch.get_num_threads()

    def fail() -> None:
        with threads(usual + 1, usual):
            assert torch.get_num_threads() == usual + 1
            raise ValueError("why not")

    with pytest.raises(ValueError, match="why not"):
        fail()
    assert torch.get_num_threads() == usual
