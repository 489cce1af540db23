"""Remote blocks as a function for autograd, compared with the same model on one machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.faults import Fault
from support.leaks import no_leaks
from swarm.client import AsyncClient
from swarm.client import remote_blocks as blocks_module
from swarm.client.remote_blocks import PATIENCE_S
from swarm.testing import virtual_time
from swarm_protocol.errors import ConfigError, SessionError, SwarmError
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

TOKENS = torch.tensor([[5, 80, 33, 21, 90, 7, 7, 12, 60, 61, 3, 140], [9, 8, 7, 6, 5, 4, 3, 2, 200, 201, 202, 203]])
CHAINS = [[(0, 6)], [(0, 2), (2, 6)], [(0, 1), (1, 4), (4, 6)]]
HALVES = [(0, 3), (3, 6)]


def local_gradient(directory: Path, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of input embeddings, and the gradient with respect to these."""
    model = AutoModelForCausalLM.from_pretrained(directory).requires_grad_(False)
    x = x.detach().clone().requires_grad_()
    logits = model(inputs_embeds=x).logits
    return logits.detach(), torch.autograd.grad(logits, x, grad)[0]


def weights_of_logits() -> Tensor:
    return torch.randn(2, 12, 256, generator=torch.Generator().manual_seed(0))


async def forward_and_back(client: AsyncClient, between: Callable[[], None] = lambda: None) -> tuple[Tensor, ...]:
    x = (await client.embed(TOKENS, model="tiny")).requires_grad_()
    logits = await client.forward(x, model="tiny", head=True)
    between()
    await asyncio.to_thread(logits.backward, weights_of_logits())
    assert x.grad is not None
    return x.detach(), logits.detach(), x.grad


def assert_as_local(directory: Path, found: tuple[Tensor, ...]) -> None:
    x, logits, grad = found
    expected_logits, expected_grad = local_gradient(directory, x, weights_of_logits())
    torch.testing.assert_close(logits, expected_logits, rtol=1e-5, atol=1e-4)
    assert (grad - expected_grad).abs().max() <= 1e-4 * expected_grad.abs().max()


def used(swarm: Any) -> list[tuple[Any, int]]:
    """Return the calls that have not ended on any server."""
    return [call for server in swarm.servers.values() for call in server.calls.room.calls]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("spans", CHAINS, ids=len)
def test_forward_over_servers_gives_the_local_logits_and_gradients(
    boxes: Any, model_dirs: Callable[[str], Path], family: str, spans: Sequence[tuple[int, int]]
) -> None:
    async def scenario() -> tuple[Tensor, ...]:
        async with boxes(model_dirs(family), spans) as swarm:
            found = await forward_and_back(swarm.client)
            assert not used(swarm)
            return found

    with no_leaks():
        assert_as_local(model_dirs(family), asyncio.run(scenario()))


def test_forward_of_some_blocks_computes_that_part_of_the_model(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 2), (2, 6)]) as swarm:
            client = swarm.client
            x = await client.embed(TOKENS, model="tiny")
            assert torch.equal(await client.embed(TOKENS[0].tolist(), model="tiny"), x[0])
            middle = await client.forward(x, model="tiny", start=0, end=3)
            normed = await client.forward(middle, model="tiny", start=3)
            local = AutoModelForCausalLM.from_pretrained(llama_dir)
            with torch.no_grad():
                states = local(TOKENS, output_hidden_states=True).hidden_states
            torch.testing.assert_close(middle, states[3], rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(normed, states[6], rtol=1e-5, atol=1e-4)
            assert torch.equal(await client.forward(TOKENS, model="tiny", end=3), middle)
            alone = await client.forward(x[1].double(), model="tiny", end=3)
            assert alone.dtype == torch.float64
            torch.testing.assert_close(alone.float(), middle[1], rtol=1e-5, atol=1e-4)
            short = await client.forward(x, model="tiny", end=3, codec="bf16")
            assert 0 < (short - middle).abs().max() < 0.02 * middle.abs().max()

    virtual_time.run(scenario())


def test_tokenize_returns_the_tokenizer_s_tokens_for_texts_and_messages(
    boxes: Any, llama_dir: Path, tokenize: Any
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as swarm:
            ids = await swarm.client.tokenize("def f():", model="tiny")
            assert ids == tokenize("def f():")
            assert await swarm.client.decode(ids, model="tiny") == "def f():"
            asked = await swarm.client.tokenize([{"role": "user", "content": "hi"}], model="tiny")
            assert asked == tokenize("user: hi\nassistant:")
            with pytest.raises(ConfigError, match="does not know"):
                await swarm.client.decode([256], model="tiny")

    virtual_time.run(scenario())


def soft_prompt_losses(embedded_TH: Tensor, target_T: Tensor, logits_of: Callable[[Tensor], Tensor]) -> list[float]:
    prompt = torch.nn.Parameter(0.02 * torch.randn(4, 32, generator=torch.Generator().manual_seed(0)))
    optimizer = torch.optim.Adam([prompt], lr=0.1)
    losses = []
    for _ in range(6):
        loss = cross_entropy(logits_of(torch.cat([prompt, embedded_TH]))[3:-1], target_T)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_soft_prompt_learns_over_servers_as_it_does_locally(boxes: Any, llama_dir: Path) -> None:
    target_T = TOKENS[0]

    async def scenario() -> tuple[Tensor, list[float]]:
        async with boxes(llama_dir, CHAINS[2]) as swarm:
            loop = asyncio.get_running_loop()
            embedded = await swarm.client.embed(target_T, model="tiny")

            def logits_of(x: Tensor) -> Tensor:
                asked = swarm.client.forward(x, model="tiny", head=True)
                return asyncio.run_coroutine_threadsafe(asked, loop).result()

            return embedded, await asyncio.to_thread(soft_prompt_losses, embedded, target_T, logits_of)

    embedded, losses = asyncio.run(scenario())
    local = AutoModelForCausalLM.from_pretrained(llama_dir).requires_grad_(False)
    expected = soft_prompt_losses(embedded, target_T, lambda x: local(inputs_embeds=x[None]).logits[0])
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[-1] < losses[0] - 0.3


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spares", [[(0, 3)], [(0, 1), (1, 3)]], ids=["one", "two"])
def test_server_killed_between_forward_and_backward_costs_no_result(
    boxes: Any, llama_dir: Path, spares: Sequence[tuple[int, int]]
) -> None:
    async def scenario() -> tuple[Tensor, ...]:
        async with boxes(llama_dir, HALVES) as swarm:
            loop = asyncio.get_running_loop()
            for start, end in spares:
                await swarm.add(start, end)
            first = swarm.who["s0"]
            blocks = await swarm.blocks(head=True)
            blocks._known.servers = {p: r for p, r in blocks._known.servers.items() if r.end == 6 or p == first}
            x = await swarm.client.embed(TOKENS, model="tiny")
            logits, parts = await blocks.forward(x, 0, 6)
            assert [part.by.peer_id for part in parts] == list(swarm.servers)[:2]
            swarm.internet.crash(first)
            since_s = loop.time()
            grad = await blocks.backward(parts, weights_of_logits())
            assert loop.time() - since_s < 3
            return x, logits, grad

    assert_as_local(llama_dir, virtual_time.run(scenario()))


@pytest.mark.parametrize(("phase", "nth"), [("serve/forward", 2), ("serve/forward", 3), ("serve/backward", 1)])
@pytest.mark.parametrize("what", ["kill", "stall", "raise"])
def test_call_gives_the_local_result_when_a_server_fails_during_it(
    boxes: Any, llama_dir: Path, phase: str, nth: int, what: Any
) -> None:
    async def scenario() -> tuple[Tensor, ...]:
        # the embeddings are a forward call, too
        faults = [Fault(who="*", phase=phase, what=what, nth=nth)]
        async with boxes(llama_dir, [(0, 3), (3, 6), (0, 3), (3, 6)], faults=faults) as swarm:
            blocks = await swarm.blocks(head=True)
            x = await swarm.client.embed(TOKENS, model="tiny")
            logits, parts = await blocks.forward(x, 0, 6)
            return x, logits, await blocks.backward(parts, weights_of_logits())

    assert_as_local(llama_dir, virtual_time.run(scenario()))


def test_call_finds_a_server_that_joins_while_others_fail_slowly(
    boxes: Any, llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time that failing servers take does not count as time without servers."""

    async def scenario() -> None:
        faults = [Fault(who=server, phase="serve/forward", what="stall") for server in ("s0", "s1")]
        async with boxes(llama_dir, [(0, 6), (0, 6)], faults=faults) as swarm:
            first = [swarm.who[server] for server in ("s0", "s1")]
            asking = asyncio.create_task(swarm.client.forward(TOKENS, model="tiny", end=3))
            await asyncio.sleep(5)
            await swarm.add(0, 6)
            await asyncio.sleep(PATIENCE_S)
            assert not asking.done()
            for server in first:
                swarm.internet.crash(server)
            assert (await asking).shape == (2, 12, 32)

    monkeypatch.setattr(blocks_module, "FLOOR_S", PATIENCE_S)  # the client waits for both, however slow this machine is
    virtual_time.run(scenario())


def test_autograd_uses_other_servers_when_one_dies_before_its_backward(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> tuple[Tensor, ...]:
        async with boxes(llama_dir, HALVES) as swarm:
            await swarm.add(3, 6)
            await swarm.known(3)

            def kill() -> None:
                for peer_id in list(swarm.servers)[1:]:
                    if swarm.servers[peer_id].calls._paces:
                        swarm.internet.crash(peer_id)

            return await forward_and_back(swarm.client, kill)

    with no_leaks():
        assert_as_local(llama_dir, asyncio.run(scenario()))


def test_call_fails_with_the_reason_when_the_only_server_leaves(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, HALVES) as swarm:
            x = await swarm.client.embed(TOKENS, model="tiny")
            await next(iter(swarm.servers.values())).drain()
            with pytest.raises(SwarmError, match=r"takes no new sessions|0:3"):
                await swarm.client.forward(x, model="tiny")

    virtual_time.run(scenario())


def test_cancelled_call_frees_its_server(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> None:
        faults = [Fault(who="s0", phase="serve/forward", what="stall", nth=2)]
        async with boxes(llama_dir, [(0, 6)], faults=faults) as swarm:
            x = await swarm.client.embed(TOKENS, model="tiny")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await swarm.client.forward(x, model="tiny")
            await asyncio.sleep(1)
            assert not used(swarm)
            assert swarm.client._state.health.load == {}

    virtual_time.run(scenario())


def test_backward_is_refused_in_the_client_s_own_loop(boxes: Any, llama_dir: Path) -> None:
    async def scenario() -> Tensor:
        async with boxes(llama_dir, [(0, 6)]) as swarm:
            x = (await swarm.client.embed(TOKENS, model="tiny")).requires_grad_()
            logits: Tensor = await swarm.client.forward(x, model="tiny", head=True)
            with pytest.raises(ConfigError, match="to_thread"):
                logits.sum().backward(retain_graph=True)
            with pytest.raises(ConfigError, match="cannot be sent"):
                await asyncio.to_thread(logits.backward, weights_of_logits() / 0, retain_graph=True)
            with torch.no_grad():
                assert not (await swarm.client.forward(x, model="tiny")).requires_grad
            return logits

    logits = asyncio.run(scenario())
    with pytest.raises(SessionError, match="closed"):
        logits.sum().backward()


# --- bad input --------------------------------------------------------------------------------------------------------

GOOD = torch.zeros(2, 3, 32)


@pytest.mark.parametrize(
    ("x", "options", "what"),
    [
        (torch.full((3, 32), float("nan")), {}, "not finite"),
        ([1, 2], {}, r"is \[1, 2\] and not a tensor"),
        (torch.zeros(3, 31), {}, "31 columns"),
        (torch.zeros(32), {}, "shape"),
        (torch.zeros(1, 2, 3, 32), {}, "shape"),
        (torch.zeros(0, 32), {}, "shape"),
        (torch.zeros(1, 1, 32).expand(2**11, 2**10, 32), {}, "positions"),
        (torch.tensor([256]), {}, "not token ids"),
        (torch.tensor([3]), {"start": 1}, "first block"),
        (GOOD, {"start": 4, "end": 4}, "blocks"),
        (GOOD, {"start": -1}, "blocks"),
        (GOOD, {"end": 7}, "blocks"),
        (GOOD, {"start": "a"}, "start is 'a'"),
        (GOOD, {"end": 1.5}, "end is 1.5"),
        (GOOD, {"end": 3, "head": True}, "head"),
        (GOOD, {"codec": "int8"}, "codec"),
        (GOOD, {"model": "nobody's"}, "name|nobody serves"),
    ],
)
def test_input_that_no_server_accepts_is_a_config_error(
    boxes: Any, llama_dir: Path, x: Tensor, options: dict[str, Any], what: str
) -> None:
    async def scenario() -> None:
        async with boxes(llama_dir, [(0, 6)]) as swarm:
            with pytest.raises(ConfigError, match=what):
                await swarm.client.forward(x, **{"model": "tiny", **options})

    virtual_time.run(scenario())
