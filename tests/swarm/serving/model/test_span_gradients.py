"""Blocks as a stateless function for autograd: values and gradients against those of the local model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from swarm.serving.model.batch import Batch, SequenceRows, Want
from swarm.serving.model.model_files import open_model
from swarm.serving.model.span import Span
from swarm.serving.model.span_loading import load_span
from swarm_protocol.errors import ConfigError
from transformers import AutoModelForCausalLM

FAMILIES = ["llama-tied", "qwen3", "mistral", "mixtral", "gpt2"]
TOKENS = torch.tensor([[5, 80, 33, 21, 90, 7, 7, 12, 60, 61, 3, 140], [9, 8, 7, 6, 5, 4, 3, 2, 200, 201, 202, 203]])


@pytest.fixture(scope="module")
def spans(model_dirs: Callable[[str], Path], request: pytest.FixtureRequest) -> tuple[Path, list[Span]]:
    directory = model_dirs(request.param)
    files = open_model(directory)
    return directory, [load_span(files, 0, 4), load_span(files, 4, 6)]


@pytest.mark.parametrize("spans", FAMILIES, indirect=True)
def test_backward_through_a_chain_gives_the_gradient_of_the_local_model(spans: tuple[Path, list[Span]]) -> None:
    directory, (first, last) = spans
    local = AutoModelForCausalLM.from_pretrained(directory).requires_grad_(False)
    embeddings = torch.stack([first.embed(row) for row in TOKENS]).clone().requires_grad_()
    expected = local(inputs_embeds=embeddings).logits
    grad_logits = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    (expected_grad,) = torch.autograd.grad(expected, embeddings, grad_logits)

    parts = [(first, 0, 2), (first, 2, 4), (last, 4, 6)]
    inputs, x = [], embeddings.detach()
    for span, start, end in parts:
        inputs.append(x)
        x = span.forward(x, start, end)
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-4)
    grad = grad_logits
    for (span, start, end), given in zip(reversed(parts), reversed(inputs), strict=True):
        grad = span.backward(given, grad, start, end)
    assert (grad - expected_grad).abs().max() <= 1e-5 * expected_grad.abs().max()
    assert all(parameter.grad is None for span in (first, last) for parameter in span._model.parameters())


@pytest.mark.parametrize("spans", FAMILIES, indirect=True)
def test_forward_without_head_ends_with_the_last_norm(spans: tuple[Path, list[Span]]) -> None:
    directory, (first, last) = spans
    local = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        expected = local.base_model(input_ids=TOKENS).last_hidden_state
        found = last.forward(first.forward(TOKENS, 0, 4), 4, 6, head=False)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("spans", [*FAMILIES, "bloom"], indirect=True)
def test_head_on_slices_of_the_last_output_gives_the_logits_of_the_local_model(spans: tuple[Path, list[Span]]) -> None:
    directory, (first, last) = spans
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(directory)(TOKENS).logits
        hidden = last.last_output(first.forward(TOKENS, 0, 4), 4)
        found = torch.cat([last.head(hidden[:, low : low + 5]) for low in range(0, 12, 5)], dim=1)
        whole = last.forward(first.forward(TOKENS, 0, 4), 4, 6)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("spans", ["llama", "gpt2"], indirect=True)
def test_run_of_embeddings_equals_run_of_tokens_and_is_unaffected_by_a_forward_between(
    spans: tuple[Path, list[Span]],
) -> None:
    _, (first, _) = spans
    piece = SequenceRows(num_tokens=len(TOKENS[0]), position=0, pages=[0], want=Want.ALL)

    def run(x: torch.Tensor) -> torch.Tensor:
        (output,) = first.run(Batch(x=x, pieces=(piece,), start=0, end=3), first.new_pool(1))
        assert output is not None
        return output

    of_tokens = run(TOKENS[0])
    with torch.no_grad():
        stateless = first.forward(TOKENS[:1], 0, 3)[0]
    torch.testing.assert_close(of_tokens, stateless, rtol=1e-4, atol=1e-4)
    assert torch.equal(run(first.embed(TOKENS[0])), of_tokens)


def test_backward_through_int8_is_near_and_through_int4_is_refused(llama_dir: Path) -> None:
    files, x = open_model(llama_dir), torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    exact = load_span(files, 2, 4).backward(x, torch.ones_like(x), 2, 4)
    near = load_span(files, 2, 4, dtype=torch.bfloat16, bits="int8").backward(x, torch.ones_like(x), 2, 4)
    assert (near.float() - exact).norm() <= 0.2 * exact.norm()
    with pytest.raises(ConfigError, match="no gradient"):
        load_span(files, 2, 4, dtype=torch.bfloat16, bits="int4").backward(x, torch.ones_like(x), 2, 4)
