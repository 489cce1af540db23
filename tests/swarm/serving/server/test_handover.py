"""A session that continues at another server where it stopped, and every way in which a handover can fail."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from support.arithmetic_span import alone, prompt_of
from support.faults import Fault
from support.served_chain import MODEL, Talk, World, floats, opening, sequence_id, token_rows, with_servers
from swarm.serving.server.push_connections import MAX_PEERS, REST_S
from swarm_protocol.errors import IntegrityError, PeerError, PeerRefused, PeerUnreachable
from swarm_protocol.serving_messages import KV_METHOD, KvHeader, KvRequest
from swarm_protocol.session_frames import AllowHandover, SequenceRef

PROMPT = prompt_of(40)
SPANS = [(0, 4), (0, 4)]


async def begun(world: World, **changes: Any) -> list[Talk]:
    """Open a session at s0 that has run all but the last token of PROMPT."""
    talks = [await world.talk(index) for index in range(2)]
    await talks[0].open(1, **changes)
    await talks[0].step(token_rows(*PROMPT[:30]), 0)
    await talks[0].step(token_rows(*PROMPT[30:39]), 30)
    return talks


def source(world: World) -> SequenceRef:
    return SequenceRef(peer_id=world.servers[0].peer_id, sequence_id=sequence_id(1))


def test_session_continues_where_it_stopped_after_a_handover() -> None:
    async def work(world: World) -> None:
        talks = await begun(world)
        talks[0].connection.send(AllowHandover(sequence_id=sequence_id(1), to_peer_id=world.servers[1].peer_id))
        ready = await talks[1].open(2, take_over=source(world))
        assert ready.length == 39
        result = await talks[1].step(token_rows(PROMPT[39]), 39, 2, want="last")
        assert torch.equal(floats(result.rows), alone(PROMPT)[-1:])
        assert world.servers[1].engine.num_tokens == 1
        # the taken pages are not offered as prefixes
        assert world.servers[1].engine.pages.num_kept == 0
        assert world.servers[0].engine.num_sequences == 1

    with_servers(work, SPANS)


@pytest.mark.parametrize("is_allowed_first", [True, False])
def test_handover_loses_and_repeats_nothing_whether_a_step_of_the_same_moment_comes_before_or_after_it_is_allowed(
    is_allowed_first: bool,
) -> None:
    async def work(world: World) -> None:
        talks = await begun(world)
        allow = AllowHandover(sequence_id=sequence_id(1), to_peer_id=world.servers[1].peer_id)
        if is_allowed_first:
            talks[0].connection.send(allow)
        talks[0].send_step(token_rows(PROMPT[39]), 39)
        if not is_allowed_first:
            talks[0].connection.send(allow)
        length = (await talks[1].open(2, take_over=source(world))).length
        assert length in (39, 40)
        rest = [*PROMPT[length:], 7]
        result = await talks[1].step(token_rows(*rest), length, 2, want="last")
        assert torch.equal(floats(result.rows), alone([*PROMPT, 7])[-1:])
        assert world.servers[1].engine.num_tokens == len(rest)

    with_servers(work, SPANS)


def test_session_can_be_handed_over_to_two_servers() -> None:
    async def work(world: World) -> None:
        talks = [await world.talk(index) for index in range(3)]
        await talks[0].open(1)
        await talks[0].step(token_rows(*PROMPT[:30]), 0)
        for server in world.servers[1:]:
            talks[0].connection.send(AllowHandover(sequence_id=sequence_id(1), to_peer_id=server.peer_id))
        for talk in talks[1:]:
            assert (await talk.open(2, take_over=source(world))).length == 30

    with_servers(work, [(0, 4), (0, 1), (1, 4)])


REFUSED: dict[str, dict[str, Any]] = {
    "not allowed": {"to": None},
    "allowed to another": {"to": 0},
    "no such session": {"session": 5},
    "other blocks": {"old": {"end": 3}},
    "too little room": {"max_tokens": 20},
}


@pytest.mark.parametrize("case", REFUSED)
def test_failed_handover_ends_only_the_new_session(case: str) -> None:
    wrong = REFUSED[case]

    async def work(world: World) -> None:
        talks = await begun(world, **wrong.get("old", {}))
        to = wrong.get("to", 1)
        if to is not None:
            talks[0].connection.send(AllowHandover(sequence_id=sequence_id(1), to_peer_id=world.servers[to].peer_id))
        changes = {key: value for key, value in wrong.items() if key == "max_tokens"}
        ref = SequenceRef(peer_id=world.servers[0].peer_id, sequence_id=sequence_id(wrong.get("session", 1)))
        error = await talks[1].refused(2, take_over=ref, **changes)
        assert isinstance(error, PeerError)
        await world.servers[1].freed()
        assert (await talks[0].step(token_rows(PROMPT[39]), 39)).position == 40

    with_servers(work, SPANS)


@pytest.mark.parametrize("what", ["kill", "raise"])
def test_handover_leaves_nothing_when_its_server_dies(what: Any) -> None:
    async def work(world: World) -> None:
        talks = await begun(world)
        talks[0].connection.send(AllowHandover(sequence_id=sequence_id(1), to_peer_id=world.servers[1].peer_id))
        error = await talks[1].refused(2, take_over=source(world))
        assert isinstance(error, PeerUnreachable)
        await world.servers[1].freed()
        assert (await talks[1].open(2)).length == 0

    fault = Fault(who="s0", phase="serve/handover", what=what)
    with_servers(work, SPANS, faults=[fault], dead=[0] if what == "kill" else [])


def test_handover_leaves_nothing_when_its_client_leaves() -> None:
    async def work(world: World) -> None:
        talks = await begun(world)
        talks[0].connection.send(AllowHandover(sequence_id=sequence_id(1), to_peer_id=world.servers[1].peer_id))
        talks[1].connection.send(opening(world.servers[1], 2, take_over=source(world)))
        async with asyncio.timeout(60):
            while ("s0", "serve/handover") not in world.script.num_hits:
                await asyncio.sleep(0.001)
        await world.talks.aclose()
        for server in world.servers:
            await server.freed()

    with_servers(work, SPANS, faults=[Fault(who="s0", phase="serve/handover", what="stall")])


@pytest.mark.parametrize("case", ["garbage", "too much", "too little", "not finite", "nothing"])
def test_handover_is_refused_when_the_data_are_malformed(case: str) -> None:
    async def give(peer_id: str, stream: Any) -> None:
        KvRequest.from_bytes(await stream.receive())
        if case == "nothing":
            return
        await stream.send(KvHeader(length=20).to_bytes() if case != "garbage" else b"garbage")
        page_bytes = 2 * 4 * 16 * 4  # keys and values, blocks, positions, fp32
        num_pages = {"too much": 3, "too little": 1}.get(case, 2)
        await stream.send((b"\xff" if case == "not finite" else b"\x00") * page_bytes * num_pages)

    async def work(world: World) -> None:
        liar = world.internet.network()
        await liar.serve_stream(f"{KV_METHOD}/{MODEL}", give)
        talk = await world.talk()
        error = await talk.refused(1, take_over=SequenceRef(peer_id=liar.peer_id, sequence_id=sequence_id(9)))
        assert isinstance(error, IntegrityError | PeerError)
        await world.servers[0].freed()
        await liar.close()

    with_servers(work)


def test_handover_is_refused_to_peers_that_the_client_did_not_name() -> None:
    async def work(world: World) -> None:
        await begun(world)
        request = KvRequest(client_peer_id=world.client.peer_id, sequence_id=sequence_id(1), start=0, end=4)
        # not even to the client itself, which did not allow it
        async with world.client.stream(world.servers[0].peer_id, f"{KV_METHOD}/{MODEL}", timeout_s=5) as stream:
            await stream.send(request.to_bytes())
            with pytest.raises(PeerRefused):
                await stream.receive()

    with_servers(work, SPANS)


def test_handover_dials_a_bounded_number_of_peers_for_a_client() -> None:
    async def work(world: World) -> None:
        talk = await world.talk()
        dead = [world.internet.network().peer_id for _ in range(MAX_PEERS[-1] + 1)]
        errors = [
            await talk.refused(2, take_over=SequenceRef(peer_id=peer, sequence_id=sequence_id(1))) for peer in dead
        ]
        assert ["dial" in str(error) for error in errors] == [False] * MAX_PEERS[-1] + [True]
        again = await talk.refused(2, take_over=SequenceRef(peer_id=dead[0], sequence_id=sequence_id(1)))
        assert isinstance(again, PeerRefused)
        await asyncio.sleep(REST_S)
        late = await talk.refused(2, take_over=SequenceRef(peer_id=dead[0], sequence_id=sequence_id(1)))
        assert "dial" not in str(late)

    with_servers(work)
