"""Servers of several weights under one name, behind a gateway: which of them answer, also after a restart."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import openai as api
import pytest
from node.gateway.gateway_swarm import Swarm, gateway, gateway_swarm
from node.gateway.scripted_client import ScriptedClient, ScriptedModel, converse
from openai import AsyncOpenAI
from swarm.client import AsyncClient, OtherRevision, UsedRevisions
from swarm.client.async_client import ClientOptions
from swarm.serving.model.model_files import open_model
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import initial_theta
from swarm.training.run.run_tables import DEFAULT_MODEL
from swarm.training.state.export import export_hf
from swarm_node.storage.client_models import used_in

SMALL = {**DEFAULT_MODEL, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.3}
OWN, OTHER = "5c819ed1" * 4, "0d1e2f3a" * 4


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two checkpoints with other weights for each, the one with the greater digest last."""
    directories = []
    for seed in (1, 2):
        run = RunConfig(name="small", model=SMALL, seed=seed)
        directories.append(tmp_path_factory.mktemp("gateway") / "small")
        export_hf(initial_theta(run), run, directories[-1])
    return sorted(directories, key=lambda directory: open_model(directory).revision())


async def ask(openai: AsyncOpenAI, model: str = "small") -> str:
    answer = await openai.completions.create(model=model, prompt="def add(a, b):", max_tokens=12, temperature=0)
    return answer.choices[0].text


async def restarted(swarm: Swarm, stack: AsyncExitStack, used: UsedRevisions | None) -> AsyncOpenAI:
    """Start another gateway in its place."""
    client = AsyncClient(network=swarm.network, membership=swarm.membership, options=ClientOptions(used=used))
    return await gateway(stack, await stack.enter_async_context(aclosing(client)))


def test_gateway_keeps_the_weights_that_it_has_used_also_after_a_restart(
    checkpoints: list[Path], tmp_path: Path
) -> None:
    """Two newcomers with a greater digest would otherwise take the name over."""
    honest, other = checkpoints
    own_revision, other_revision = (open_model(checkpoint).revision() for checkpoint in checkpoints)

    async def main() -> None:
        path = tmp_path / "revisions.json"
        used = used_in(path, "test")
        async with gateway_swarm(honest, (0, 1), (1, 2), used=used) as swarm, AsyncExitStack() as stack:
            expected = await ask(swarm.openai)
            for start, end in ((0, 1), (1, 2)):
                await swarm.add(other, start, end)
            await swarm.known()
            again = await restarted(swarm, stack, used_in(path, "test"))
            assert await ask(again) == expected
            assert await ask(again, f"small@{own_revision[:8]}") == expected
            shown = await again.models.retrieve("small")
            assert shown.model_extra == {
                "revision": own_revision,
                "publisher": None,
                "manifest": None,
                "standing": "unpublished",
                "other_revisions": [{"revision": other_revision, "num_servers": 2, "is_whole": True}],
            }
            taken_over = await ask(again, f"small@{other_revision}")
            assert taken_over != expected
            listed = f"'small@{own_revision[:12]}', 'small@{other_revision[:12]}'"
            for pinned in ("small@00000000", f"small@{own_revision[:7]}", "small@"):
                with pytest.raises(api.NotFoundError, match=f"'{pinned}' is not served here; served: {listed}"):
                    await ask(again, pinned)
            without_memory = await restarted(swarm, stack, used_in(path, "another network"))
            assert await ask(without_memory) == taken_over

    asyncio.run(main())


def test_gateway_model_with_a_gap_names_the_other_weights_that_are_whole() -> None:
    others = [
        OtherRevision(revision=OTHER, num_blocks=4, num_servers=1, missing=()),
        OtherRevision(revision="f" * 32, num_blocks=4, num_servers=1, missing=((0, 1),)),
    ]
    client = ScriptedClient(served=[ScriptedModel(missing=[(1, 3)], revision=OWN, others=others)])

    async def conversation(openai: AsyncOpenAI) -> None:
        with pytest.raises(api.InternalServerError) as caught:
            await openai.completions.create(model="tiny", prompt="hi")
        assert (
            "tiny: nobody serves blocks 1:3 of 4 in revision 5c819ed15c81; complete: tiny@0d1e2f3a0d1e"
        ) in caught.value.message

    converse(client, conversation)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'{"network_id": "net"}',
        b'{"network_id": "net", "used": ["tiny"]}',
        b'{"network_id": "net", "used": {"tiny": 5}}',
        b'{"network_id": "net", "used": {"../etc": ["r"]}}',
        b'{"network_id": "net", "used": {"tiny": [["r"]]}}',
        b" " * 10**6,
    ],
)
def test_broken_file_of_used_models_is_a_warning_and_ignored(
    tmp_path: Path, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "revisions.json"
    path.write_bytes(text)
    used = used_in(path, "net")
    assert used.of("tiny") == ()
    assert "which models were used is lost" in caplog.text
    used.add("tiny", "r")
    assert list(used_in(path, "net").of("tiny")) == ["r"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_used_models_that_cannot_be_written_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    used = used_in(tmp_path / "missing" / "revisions.json", "net")
    used.add("tiny", "r")
    assert list(used.of("tiny")) == ["r"]
    assert "cannot write" in caplog.text
