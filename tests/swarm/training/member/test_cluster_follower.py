"""Tests a follower and the messages of its heads, which the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.round_scripts import setup
from swarm.network.interface import Stream
from swarm.network.memory.memory_network import EPOCH_S, MemoryInternet
from swarm.testing import virtual_time
from swarm.training.member.cluster_follower import HEAD_SILENT_S, MAX_RETRY_S, WELCOME_S, ClusterFollower
from swarm.training.member.interval_loop import IntervalOffer
from swarm.training.member.progress_reports import RoundLog
from swarm.training.round.clusters import Clusters
from swarm.training.run.methods import Methods
from swarm_compression import get_codec
from swarm_protocol.errors import PeerRefused
from swarm_protocol.identity import Identity
from swarm_protocol.member_messages import FollowerWork, FollowReply, FollowRequest
from swarm_protocol.run_credentials import RunCredential, credential_of, invite_to_run
from swarm_protocol.training_messages import Contribution

pytestmark = pytest.mark.usefixtures("only_errors_logged")

ME, FIRST, SECOND = (Identity(bytes([number]) * 32) for number in range(3))
NUM_VALUES = 100
Head = Callable[[Stream], Coroutine[Any, Any, None]]


class Scene:
    """Run one follower of two heads through one step. `told` has the messages that reached it, in order. `brought` has
    the heads that took its work. `shown` says of each request whether it carried a credential. `led` says whether a
    head led it just before its interval ended, and at the end."""

    def __init__(self, leased: tuple[str, ...] = (ME.peer_id,), credential: RunCredential | None = None) -> None:
        self.told: list[str] = []
        self.brought: list[str] = []
        self.shown: list[bool] = []
        self.led: list[bool] = []
        self._internet = MemoryInternet()
        self._networks = {each.peer_id: self._internet.network(each) for each in (ME, FIRST, SECOND)}
        clusters = Clusters(dealt={ME.peer_id: (FIRST.peer_id, SECOND.peer_id)}, size=8)
        self._setup = setup(ME.peer_id, num_values=NUM_VALUES, clusters=clusters, leased=leased, credential=credential)

    async def play(self, first: Head | None, second: Head | None, *, seconds: float, ready_at_s: float = 1.0) -> None:
        methods = Methods(self._setup.run)
        for head, play in ((FIRST, first), (SECOND, second)):
            if play is not None:
                await self._networks[head.peer_id].serve_stream(methods.follow, self._served(play))
        with ThreadPoolExecutor(1) as executor:
            context: Any = SimpleNamespace(
                network=self._networks[ME.peer_id],
                methods=methods,
                executor=executor,
                codec=get_codec("int8"),
                feedback=lambda _step: None,
                replica=SimpleNamespace(config=SimpleNamespace(max_trainers=2)),
            )
            step: Any = SimpleNamespace(
                context=context,
                setup=self._setup,
                log=RoundLog(),
                hurry=lambda: self.told.append("hurry"),
                on_abort=lambda notice: self.told.append("full" if "is full" in notice.reason else notice.reason),
            )
            queries: Any = SimpleNamespace(take_certificate=self._take_certificate)
            follower = ClusterFollower(step, queries)
            running = asyncio.create_task(follower.run())
            await asyncio.sleep(ready_at_s)
            self.led.append(follower.is_led)
            contribution = Contribution(peer_id=ME.peer_id, num_tokens=40, num_samples=10)
            offer = IntervalOffer(
                contribution=contribution, delta_F=torch.ones(NUM_VALUES), made_at=0.0, interval_s=1.0
            )
            follower.bring(offer)
            await asyncio.sleep(seconds)
            self.led.append(follower.is_led)
            running.cancel()
            await asyncio.wait({running})
            assert running.cancelled() or running.exception() is None
        for network in self._networks.values():
            await network.close()

    async def _take_certificate(self, head: str, certificate: bytes) -> None:
        self.told.append(f"{certificate.decode()} of {'first' if head == FIRST.peer_id else 'second'}")

    def _served(self, play: Head) -> Callable[[str, Stream], Coroutine[Any, Any, None]]:
        async def handle(peer: str, stream: Stream) -> None:
            assert peer == ME.peer_id
            request = FollowRequest.from_bytes(await stream.receive())
            assert request.step == self._setup.step
            self.shown.append(request.credential is not None)
            await play(stream)

        return handle

    def taking(self, name: str) -> Head:
        """Return a head that takes the work and then shows a certificate."""

        async def play(stream: Stream) -> None:
            await say(stream, "welcome")
            assert FollowerWork.from_bytes(await stream.receive()).num_tokens == 40
            assert len(await stream.receive()) == get_codec("int8").encoded_bytes(NUM_VALUES)
            self.brought.append(name)
            await say(stream, "committed", b"certificate")

        return play


async def say(stream: Stream, kind: Any, certificate: bytes = b"") -> None:
    await stream.send(FollowReply(kind=kind, certificate=certificate).to_bytes())


async def silent(_stream: Stream) -> None:
    await asyncio.sleep(1000)


async def refusing(_stream: Stream) -> None:
    raise PeerRefused("not now")


async def full(stream: Stream) -> None:
    await say(stream, "full")


async def babbling(stream: Stream) -> None:
    await stream.send(b"no message at all")


async def welcoming_and_gone(stream: Stream) -> None:
    await say(stream, "welcome")


def test_follower_brings_its_work_only_to_its_first_head() -> None:
    async def main() -> None:
        scene = Scene()
        await scene.play(scene.taking("first"), scene.taking("second"), seconds=10.0)
        assert (scene.brought, scene.told) == (["first"], ["certificate of first"])

    virtual_time.run(main())


def test_follower_is_led_while_a_head_that_accepted_it_is_present() -> None:
    async def welcoming(stream: Stream) -> None:
        await say(stream, "welcome")
        await asyncio.sleep(HEAD_SILENT_S / 2)

    async def led(first: Head | None, second: Head | None, seconds: float) -> list[bool]:
        scene = Scene()
        await scene.play(first, second, seconds=seconds)
        return scene.led

    assert virtual_time.run(led(welcoming, None, 1.0)) == [True, True]
    assert virtual_time.run(led(welcoming, None, HEAD_SILENT_S)) == [True, False], "the head has left"
    assert virtual_time.run(led(full, refusing, 5.0)) == [False, False]


@pytest.mark.parametrize("first", [None, refusing, full, babbling, welcoming_and_gone])
def test_follower_turns_to_its_second_head_when_the_first_does_not_accept_it(first: Head | None) -> None:
    async def main() -> None:
        scene = Scene()
        await scene.play(first, scene.taking("second"), seconds=10.0)
        assert (scene.brought, scene.told) == (["second"], ["certificate of second"])

    virtual_time.run(main())


def test_follower_leaves_a_head_that_does_not_answer() -> None:
    async def main() -> None:
        scene = Scene()
        await scene.play(silent, scene.taking("second"), seconds=WELCOME_S + 5.0)
        assert scene.brought == ["second"]

    virtual_time.run(main())


def test_follower_leaves_a_head_that_falls_silent_before_it_has_the_work() -> None:
    async def welcoming_and_silent(stream: Stream) -> None:
        await say(stream, "welcome")
        await asyncio.sleep(1000)

    async def main() -> None:
        scene = Scene()
        await scene.play(welcoming_and_silent, scene.taking("second"), seconds=5.0, ready_at_s=HEAD_SILENT_S + 5.0)
        assert scene.brought == ["second"]

    virtual_time.run(main())


def test_follower_brings_its_work_to_no_second_head_when_the_first_took_it_and_left() -> None:
    """The second head could otherwise count the work a second time."""

    async def taking_and_gone(stream: Stream) -> None:
        await say(stream, "welcome")
        await stream.receive()
        raise PeerRefused("not any more")

    async def main() -> None:
        scene = Scene()
        await scene.play(taking_and_gone, scene.taking("second"), seconds=100.0)
        assert (scene.brought, scene.told) == ([], [])

    virtual_time.run(main())


@pytest.mark.parametrize("has_lease", [False, True])
def test_follower_without_a_place_reports_it_once_and_retries_less_and_less_often(has_lease: bool) -> None:
    """Where rounds overlap, a follower that has a lease gets its place back in the next step."""
    num_asked = 0

    async def counting(stream: Stream) -> None:
        nonlocal num_asked
        num_asked += 1
        await say(stream, "full")

    async def main() -> None:
        scene = Scene(leased=(ME.peer_id,) if has_lease else ())
        await scene.play(counting, full, seconds=6 * MAX_RETRY_S)
        assert scene.told == ([] if has_lease else ["full"])
        assert 6 <= num_asked <= 10

    virtual_time.run(main())


def test_follower_asks_without_its_credential_when_it_is_about_to_expire() -> None:
    """Heads refuse a credential that ends before the group is signed, and the step may outlast it."""

    async def main() -> None:
        now = EPOCH_S + asyncio.get_running_loop().time()
        word = invite_to_run(FIRST, "run", network_id="test", now=now, lifetime_s=180.0, node=ME.peer_id)
        scene = Scene(credential=credential_of([word], ME.peer_id, "run", network_id="test", now=now))
        await scene.play(full, full, seconds=170.0)
        assert scene.shown[0]
        assert not scene.shown[-1]

    virtual_time.run(main())
