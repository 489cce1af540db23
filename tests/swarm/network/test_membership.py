"""Membership: records are announced at once and renewed, the newest wins, malformed ones are skipped, leaving and round
trips.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import wraps
from unittest.mock import patch

import pytest
from support.plain_records import node_record, serve_record
from swarm.network import membership as membership_module
from swarm.network import round_trips
from swarm.network.announcer import MAX_LIVES, SETTLING_S
from swarm.network.membership import MAX_SAMPLED, MAX_WARNED_OF, Membership
from swarm.network.memory.memory_link import LinkModel
from swarm.network.memory.memory_network import MemoryInternet, MemoryNetwork
from swarm.testing import virtual_time
from swarm_protocol import limits
from swarm_protocol.envelope import seal_record
from swarm_protocol.errors import PeerTimeout, PeerUnreachable, PeerViolation, SwarmError
from swarm_protocol.identity import Identity
from swarm_protocol.records import TrainerRecord, lookup_key, publish_key
from swarm_protocol.wire import encode_varint

LATENCY_S = 0.03
SEEN_S = 0.5
"""More than a publish takes."""


def in_virtual_time(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        virtual_time.run(test())

    return run


def make_internet() -> MemoryInternet:
    return MemoryInternet(default_link=LinkModel(latency_s=LATENCY_S))


def trainer_record(run: str = "run", **changes: object) -> TrainerRecord:
    return replace(TrainerRecord(run=run, outer_step=3, state="training"), **changes)


class CountingNetwork(MemoryNetwork):
    """Counts publishes, and makes them fail when the test says so."""

    failing: BaseException | bool | None = None
    publishes: list[tuple[float, str]]

    async def publish(self, key: str, payload: bytes, *, lifetime_s: float) -> bool:
        self.publishes.append((self.now(), key))
        if isinstance(self.failing, BaseException):
            raise self.failing
        return False if self.failing else await super().publish(key, payload, lifetime_s=lifetime_s)


def counting(network: MemoryNetwork) -> CountingNetwork:
    network.__class__ = CountingNetwork
    assert isinstance(network, CountingNetwork)
    network.publishes = []
    return network


@in_virtual_time
async def test_announced_records_are_seen_by_all_at_once_also_by_their_own_peer() -> None:
    internet = make_internet()
    a, b = internet.network(), internet.network()
    async with Membership(a) as at_a, Membership(b) as at_b:
        at_a.announce(node_record("a"))
        at_b.announce(node_record("b"))
        at_b.announce(serve_record())
        at_b.announce(trainer_record())
        await asyncio.sleep(SEEN_S)
        for membership in (at_a, at_b):
            assert {peer_id: node.name for peer_id, node in (await membership.nodes()).items()} == {
                a.peer_id: "a",
                b.peer_id: "b",
            }
            assert await membership.servers("tiny") == {b.peer_id: serve_record()}
            assert await membership.trainers("run") == {b.peer_id: trainer_record()}
            assert await membership.models() == ("tiny",)
            assert (await membership.nodes())[b.peer_id].runs == ("run",)
    await internet.close()


@in_virtual_time
async def test_node_record_of_a_long_lived_node_is_published_more_rarely_and_never_lapses() -> None:
    internet = make_internet()
    a, b = counting(internet.network()), internet.network()
    async with Membership(a) as at_a, Membership(b) as at_b:
        at_a.announce(node_record("a"))
        at_a.announce(serve_record())
        for _ in range(300):
            await asyncio.sleep((MAX_LIVES * SETTLING_S + 600) / 300)
            assert a.peer_id in await at_b.nodes()
        late = [key for time_s, key in a.publishes if time_s > a.now() - 570]
        num_serve = sum(key.startswith("serve") for key in late)
        assert num_serve >= 19
        assert sum(key.startswith("nodes") for key in late) == pytest.approx(num_serve / MAX_LIVES, abs=1)
    await internet.close()


@in_virtual_time
async def test_long_lived_node_is_dropped_within_five_lifetimes_and_known_again_at_once() -> None:
    async def announce(network: MemoryNetwork, name: str) -> None:
        async with Membership(network) as membership:
            membership.announce(node_record(name))
            await asyncio.Event().wait()

    internet = make_internet()
    dead, back, observer = internet.network(), internet.network(), internet.network()
    async with Membership(observer) as at_observer:
        announcing = [asyncio.create_task(announce(network, "before")) for network in (dead, back)]
        await asyncio.sleep(MAX_LIVES * SETTLING_S + 600)
        for network, task in zip((dead, back), announcing, strict=True):
            internet.crash(network.peer_id)
            task.cancel()
        await asyncio.wait(announcing)
        again = asyncio.create_task(announce(internet.restart(back.peer_id), "after"))
        await asyncio.sleep(limits.RECORD_LIFETIME_S)
        names = {peer_id: node.name for peer_id, node in (await at_observer.nodes()).items()}
        assert names == {dead.peer_id: "before", back.peer_id: "after"}
        await asyncio.sleep((MAX_LIVES - 1) * limits.RECORD_LIFETIME_S)
        assert set(await at_observer.nodes()) == {back.peer_id}
        again.cancel()
        await asyncio.wait([again])
    await internet.close()


@in_virtual_time
async def test_records_are_republished_before_half_their_life_and_never_lapse() -> None:
    internet = make_internet()
    a, b = counting(internet.network()), internet.network()
    async with Membership(a) as at_a, Membership(b) as at_b:
        at_a.announce(node_record("a"))
        for _ in range(int(SETTLING_S)):
            await asyncio.sleep(1)
            assert a.peer_id in await at_b.nodes()
        times = [time_s for time_s, _ in a.publishes]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert all(0.44 * limits.RECORD_LIFETIME_S < gap <= 0.51 * limits.RECORD_LIFETIME_S for gap in gaps)
        assert len(set(gaps)) > 1
    await internet.close()


@in_virtual_time
async def test_ages_are_by_kind_and_name_and_count_from_each_peer_s_last_record() -> None:
    internet = make_internet()
    a, b, c = internet.network(), internet.network(), internet.network()
    async with Membership(a) as at_a, Membership(b) as at_b, Membership(c) as at_c:
        at_a.announce(node_record("a"))
        at_a.announce(serve_record())
        await asyncio.sleep(5)
        at_b.announce(trainer_record())
        await asyncio.sleep(5)
        assert at_c.ages_s("nodes") == {}  # nobody has been asked yet
        await at_c.nodes()
        await at_c.servers("tiny")
        await at_c.trainers("run")
        assert at_c.ages_s("nodes") == pytest.approx({a.peer_id: 10}, abs=SEEN_S)
        assert at_c.ages_s("serve", "tiny") == pytest.approx({a.peer_id: 10}, abs=SEEN_S)
        assert at_c.ages_s("train", "run") == pytest.approx({b.peer_id: 5}, abs=SEEN_S)
        assert at_c.ages_s("train", "another") == {}
        internet.crash(a.peer_id)
        await asyncio.sleep(30)
        assert at_c.ages_s("nodes") == pytest.approx({a.peer_id: 40}, abs=SEEN_S)
    await internet.close()


@in_virtual_time
async def test_renewed_records_are_published_at_once_and_not_only_when_they_are_due() -> None:
    internet = make_internet()
    async with Membership(internet.network()) as ours, Membership(internet.network()) as theirs:
        ours.announce(serve_record())
        ours.announce(trainer_record())
        await asyncio.sleep(10)
        ours.renew()
        await asyncio.sleep(SEEN_S)
        for kind, name, look_up in (("serve", "tiny", theirs.servers), ("train", "run", theirs.trainers)):
            await look_up(name)
            assert max(theirs.ages_s(kind, name).values()) < 2 * SEEN_S
    await internet.close()


@in_virtual_time
async def test_announcing_again_replaces_at_once() -> None:
    internet = make_internet()
    a, b = internet.network(), internet.network()
    async with Membership(a) as at_a, Membership(b) as at_b:
        at_a.announce(serve_record(queue_depth=1))
        await asyncio.sleep(SEEN_S)
        at_a.announce(serve_record(queue_depth=2))
        await asyncio.sleep(SEEN_S)
        assert (await at_b.servers("tiny"))[a.peer_id].queue_depth == 2
    await internet.close()


@in_virtual_time
async def test_announcing_twice_at_the_same_moment_leaves_the_later_record() -> None:
    internet = MemoryInternet()
    a, b = internet.network(), internet.network()
    async with Membership(a) as at_a, Membership(b) as at_b:
        for state in ("joining", "serving"):
            at_a.announce(serve_record(state=state))
            while (await at_b.servers("tiny")).get(a.peer_id) != serve_record(state=state):
                await asyncio.sleep(0)
    await internet.close()


@in_virtual_time
async def test_withdrawn_record_is_marked_as_leaving_then_expires_and_its_model_is_gone_at_once() -> None:
    internet = make_internet()
    a, b = internet.network(), internet.network()
    async with Membership(a) as at_a, Membership(b) as at_b:
        at_a.announce(node_record("a"))
        at_a.announce(serve_record())
        await asyncio.sleep(SEEN_S)
        at_a.withdraw("serve", "tiny")
        at_a.withdraw("train", "never announced")
        await asyncio.sleep(SEEN_S)
        assert (await at_b.servers("tiny"))[a.peer_id].state == "draining"
        assert await at_b.models() == ()
        await asyncio.sleep(limits.RECORD_LIFETIME_S)
        assert await at_b.servers("tiny") == {}
        assert a.peer_id in await at_b.nodes()
    await internet.close()


@in_virtual_time
async def test_leaving_is_announced_at_once_in_every_record() -> None:
    internet = make_internet()
    a, b = internet.network(), internet.network()
    async with Membership(b) as at_b:
        async with Membership(a) as at_a:
            at_a.announce(node_record("a"))
            at_a.announce(serve_record())
            at_a.announce(trainer_record())
            at_a.announce(trainer_record("done", state="finished"))
            await asyncio.sleep(SEEN_S)
        assert (await at_b.nodes())[a.peer_id].state == "leaving"
        assert (await at_b.servers("tiny"))[a.peer_id].state == "draining"
        assert (await at_b.trainers("run"))[a.peer_id].state == "leaving"
        assert (await at_b.trainers("done"))[a.peer_id].state == "finished"
        await asyncio.sleep(limits.RECORD_LIFETIME_S + 1)
        assert await at_b.nodes() == {}
    await internet.close()


@in_virtual_time
async def test_killed_peer_is_dropped_within_its_record_s_lifetime() -> None:
    internet = make_internet()
    a, b = internet.network(), internet.network()
    async with Membership(b) as at_b, Membership(a) as at_a:
        at_a.announce(node_record("a"))
        await asyncio.sleep(SEEN_S)
        internet.crash(a.peer_id)
        await asyncio.sleep(limits.RECORD_LIFETIME_S)
        assert await at_b.nodes() == {}
    await internet.close()


@pytest.mark.parametrize("failure", [PeerUnreachable("no route"), PeerTimeout("too slow"), True])
def test_failed_publishes_are_counted_warned_of_once_and_retried(
    failure: BaseException | bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        internet = make_internet()
        a, b = counting(internet.network()), internet.network()
        async with Membership(a) as at_a, Membership(b) as at_b:
            at_a.announce(node_record("a"))
            await asyncio.sleep(SEEN_S)
            a.failing = failure
            for turn in range(20):
                at_a.announce(node_record(f"a{turn}"))
                await asyncio.sleep(1)
            await asyncio.sleep(20)
            assert at_a.num_publish_failures >= 23
            a.failing = None
            await asyncio.sleep(10)
            assert (await at_b.nodes())[a.peer_id].name == "a19"
        await internet.close()

    with caplog.at_level(logging.WARNING):
        virtual_time.run(main())
    assert len([record for record in caplog.records if "could not publish" in record.message]) == 1


def test_running_node_is_warned_of_its_clock_when_nobody_accepts_its_records(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        internet = make_internet()
        a, b = internet.network(), internet.network()
        async with Membership(a) as at_a, Membership(b):
            at_a.announce(node_record("a"))
            await asyncio.sleep(SEEN_S)
            a._access = replace(a._access, clock_offset_s=3600.0)
            at_a.renew()
            await asyncio.sleep(SEEN_S)
        await internet.close()

    with caplog.at_level(logging.WARNING, logger="swarm.network.announcer"):
        virtual_time.run(main())
    assert "its clock is ahead of theirs" in caplog.text


def test_first_node_of_a_network_is_not_warned_that_nobody_stores_its_records(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        internet = make_internet()
        async with Membership(internet.network()) as alone:
            alone.announce(node_record())
            await asyncio.sleep(100)
            assert alone.num_publish_failures > 5
        await internet.close()

    with caplog.at_level(logging.WARNING):
        virtual_time.run(main())
    assert not caplog.records


def test_bug_in_publishing_ends_the_body_of_the_context_with_the_error(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        internet = make_internet()
        a = counting(internet.network())
        noticed_s = None
        with pytest.raises(SwarmError, match="membership failed internally") as caught:  # noqa: PT012
            async with Membership(a) as at_a:
                at_a.announce(node_record())
                await asyncio.sleep(SEEN_S)
                a.failing = KeyError("a bug")
                at_a.announce(node_record("again"))
                start_s = asyncio.get_running_loop().time()
                try:
                    await asyncio.sleep(1000)
                finally:
                    noticed_s = asyncio.get_running_loop().time() - start_s
        assert noticed_s is not None
        assert noticed_s < 1
        assert caught.value.remedy
        assert not asyncio.current_task().cancelling()  # type: ignore[union-attr]
        await asyncio.sleep(1)  # its task can go on
        await internet.close()

    virtual_time.run(main())
    assert "KeyError: 'a bug'" in caplog.text


@pytest.mark.parametrize("when", ["before the bug", "after the bug"])
def test_cancellation_from_outside_is_not_mistaken_for_that_of_a_bug(when: str) -> None:
    async def main() -> None:
        internet = make_internet()
        a = counting(internet.network())
        is_in = asyncio.Event()

        async def live() -> None:
            async with Membership(a) as at_a:
                a.failing = KeyError("a bug")
                is_in.set()
                if when == "after the bug":
                    at_a.announce(node_record())
                try:
                    await asyncio.sleep(1000)
                finally:
                    await asyncio.sleep(1)  # time for the other cancellation
                    at_a.announce(node_record())

        living = asyncio.create_task(live())
        await is_in.wait()
        await asyncio.sleep(0.5)
        living.cancel()
        with pytest.raises(asyncio.CancelledError):
            await living
        await internet.close()

    virtual_time.run(main())


@in_virtual_time
async def test_error_of_the_body_of_the_context_is_raised_unchanged() -> None:
    internet = make_internet()
    with pytest.raises(PeerTimeout, match="of the body"):
        async with Membership(internet.network()):
            raise PeerTimeout("of the body")
    await internet.close()


@in_virtual_time
async def test_second_membership_of_one_network_is_refused_at_once() -> None:
    internet = make_internet()
    a = internet.network()
    async with Membership(a):
        with pytest.raises(ValueError, match="served already"):
            async with Membership(a):
                raise AssertionError
    await internet.close()


@in_virtual_time
async def test_publish_that_never_ends_is_given_up_and_others_continue() -> None:
    class StuckNetwork(MemoryNetwork):
        async def publish(self, key: str, payload: bytes, *, lifetime_s: float) -> bool:
            if key.startswith("train/"):
                await asyncio.Event().wait()
            return await super().publish(key, payload, lifetime_s=lifetime_s)

    internet = make_internet()
    a, b = internet.network(), internet.network()
    a.__class__ = StuckNetwork
    async with Membership(a) as at_a, Membership(b) as at_b:
        at_a.announce(trainer_record())
        at_a.announce(node_record())
        await asyncio.sleep(200)
        assert at_a.num_publish_failures > 3
        assert a.peer_id in await at_b.nodes()
    await internet.close()


@in_virtual_time
async def test_malformed_record_of_one_peer_hides_nobody_else_and_is_counted() -> None:
    internet = make_internet()
    a, b, liar = internet.network(), internet.network(), internet.network()
    async with Membership(a) as at_a, Membership(b) as at_b:
        at_a.announce(node_record("a"))
        await liar.publish(lookup_key("nodes"), b"no record at all", lifetime_s=60)
        await asyncio.sleep(SEEN_S)
        assert list(await at_b.nodes()) == [a.peer_id]
        num_malformed = at_b.num_malformed
        assert num_malformed > 0
        await at_b.nodes()
        assert at_b.num_malformed == num_malformed  # the same records are not checked again
    await internet.close()


@in_virtual_time
@patch.object(membership_module, "MAX_VIEW_BYTES", 3 * limits.MAX_RECORD_BYTES)
async def test_largest_records_are_left_out_when_liars_pad_theirs() -> None:
    internet = make_internet()
    a, b, *liars = (internet.network() for _ in range(8))
    record = node_record("liar").to_bytes()
    num_padding = limits.MAX_RECORD_BYTES - len(record) - 4
    padded = record + b"\xfa\x7f" + encode_varint(num_padding) + bytes(num_padding)
    async with Membership(a) as at_a, Membership(b) as at_b:
        at_a.announce(node_record("a"))
        for _ in range(3):
            for liar in liars:
                await liar.publish(publish_key(node_record("liar"), liar.peer_id), padded, lifetime_s=60)
            await asyncio.sleep(SEEN_S)
            found = await at_b.nodes()
            assert a.peer_id in found
            assert len(found) == 3
        assert at_b.num_dropped == 3 * (len(liars) - 2)
    await internet.close()


def test_signers_of_ever_new_malformed_records_are_warned_of_once_and_of_some(caplog: pytest.LogCaptureFixture) -> None:
    num_liars = MAX_WARNED_OF + 8

    async def main() -> None:
        internet = make_internet()
        b = internet.network()
        liars = [internet.network() for _ in range(num_liars)]
        async with Membership(b) as at_b:
            for number in range(3):
                for liar in liars:
                    await liar.publish(lookup_key("nodes"), b"no record %d" % number, lifetime_s=60)
                await asyncio.sleep(SEEN_S)
                await at_b.nodes()
            assert at_b.num_malformed == 3 * num_liars
        await internet.close()

    with caplog.at_level(logging.WARNING):
        virtual_time.run(main())
    assert len(caplog.records) == MAX_WARNED_OF


@in_virtual_time
async def test_record_with_lower_issued_at_never_replaces_a_newer_one() -> None:
    internet = make_internet()
    a = internet.network()
    peer = Identity.generate()
    key = publish_key(node_record(), peer.peer_id)

    async def plant(name: str, issued_at: float) -> None:
        record = node_record(name).to_bytes()
        sealed = seal_record(
            peer, network_id="test", key=key, payload=record, issued_at=issued_at, lifetime_s=60
        ).to_bytes()
        await a.offer(key, sealed)

    async with Membership(a) as at_a:
        now = a.now()
        await plant("new", now)
        assert (await at_a.nodes())[peer.peer_id].name == "new"
        a._records.clear()  # the store has lost the newer record and finds an older one
        await plant("old", now - 5)
        assert (await at_a.nodes())[peer.peer_id].name == "new"
        await asyncio.sleep(60)
        assert await at_a.nodes() == {}
    await internet.close()


@in_virtual_time
async def test_records_from_before_all_clocks_were_set_back_hide_no_later_ones() -> None:
    internet = make_internet()
    a, b = (internet.network(clock_offset_s=3600) for _ in range(2))
    async with Membership(a) as at_a, Membership(b) as at_b:
        at_a.announce(node_record("before"))
        at_a.announce(trainer_record())
        await asyncio.sleep(SEEN_S)
        assert [node.name for node in (await at_b.nodes()).values()] == ["before"]
        assert len(await at_b.some_trainers("run")) == 1
        for network in (a, b):
            network._access = replace(network._access, clock_offset_s=0.0)
        at_a.announce(node_record("after"))
        at_a.announce(trainer_record(state="finished"))
        await asyncio.sleep(SEEN_S)
        assert [node.name for node in (await at_b.nodes()).values()] == ["after"]
        for _ in range(2):
            found = await at_b.some_trainers("run")
        assert [trainer.state for trainer in found.values()] == ["finished"]
    await internet.close()


def test_listed_peers_are_bounded_and_the_known_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_module, "MAX_LISTED_PEERS", 5)

    async def main() -> None:
        internet = make_internet()
        a = internet.network()

        async def crowd(num: int, name: str) -> None:
            record = node_record(name)
            for node in [internet.network() for _ in range(num)]:
                await node.publish(publish_key(record, node.peer_id), record.to_bytes(), lifetime_s=60)

        at_a = Membership(a)
        await crowd(5, "first")
        await at_a.nodes()
        await crowd(20, "later")
        assert {node.name for node in (await at_a.nodes()).values()} == {"first"}
        assert at_a.num_dropped == 20
        await internet.close()

    virtual_time.run(main())


@in_virtual_time
async def test_lookups_of_many_names_remember_a_bounded_number() -> None:
    internet = make_internet()
    a = internet.network()
    async with Membership(a) as at_a:
        for index in range(membership_module.MAX_VIEWS * 2):
            assert await at_a.servers(f"asked-by-a-user-{index}") == {}
        assert len(at_a._views) == membership_module.MAX_VIEWS
        with pytest.raises(ValueError, match="not a name"):
            await at_a.servers("../etc")
    await internet.close()


@in_virtual_time
async def test_lookup_that_takes_too_long_raises_a_timeout() -> None:
    internet = MemoryInternet(default_link=LinkModel(latency_s=30))
    a, _ = internet.network(), internet.network()
    with pytest.raises(PeerTimeout):
        await Membership(a).nodes()
    await internet.close()


@in_virtual_time
async def test_largest_valid_records_are_published() -> None:
    internet = make_internet()
    a, b = internet.network(), internet.network()
    async with Membership(a) as at_a, Membership(b) as at_b:
        names = [f"{index}{'x' * (limits.MAX_NAME_BYTES - 1)}" for index in range(limits.MAX_MODELS_PER_NODE)]
        peers = {Identity(bytes([index]) * 32).peer_id: 1.0 for index in range(limits.MAX_RTT_PEERS)}
        addrs = tuple(f"/dns4/{index:02}{'x' * (limits.MAX_ADDR_BYTES - 8)}" for index in range(limits.MAX_ADDRS))
        at_a.announce(node_record(addrs=addrs))
        for name in names:
            at_a.announce(serve_record(model=name, rtt_ms=peers))
            at_a.announce(trainer_record(name))
        await asyncio.sleep(SEEN_S)
        assert await at_b.models() == tuple(sorted(names))
        assert (await at_b.servers(names[0]))[a.peer_id].rtt_ms == peers
        assert at_a.num_publish_failures == 0
    await internet.close()


@in_virtual_time
async def test_round_trip_is_measured_cached_and_measured_again_later() -> None:
    internet = make_internet()
    a, b = internet.network(), internet.network()
    pings = round_trips.RoundTrips(a)
    async with Membership(b):
        await asyncio.sleep(0)
        assert await pings.measure_s(b.peer_id, timeout_s=5) == pytest.approx(2 * LATENCY_S, rel=0.01)
        internet.link(a.peer_id, b.peer_id, LinkModel(latency_s=0.2))
        assert await pings.measure_s(b.peer_id, timeout_s=5) == pytest.approx(2 * LATENCY_S, rel=0.01)
        await asyncio.sleep(round_trips.LIFETIME_S)
        assert await pings.measure_s(b.peer_id, timeout_s=5) == pytest.approx(0.4, rel=0.01)
        assert await pings.measure_s(a.peer_id, timeout_s=5) == 0.0
    await internet.close()


@in_virtual_time
async def test_round_trip_to_a_dead_peer_raises_and_stores_nothing() -> None:
    internet = make_internet()
    a, b = internet.network(), internet.network()
    pings = round_trips.RoundTrips(a)
    internet.crash(b.peer_id)
    with pytest.raises(PeerUnreachable):
        await pings.measure_s(b.peer_id, timeout_s=5)
    assert pings.known_s(b.peer_id) is None
    await internet.close()


def test_round_trips_are_remembered_of_a_bounded_number_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_trips, "MAX_PEERS", 3)

    async def main() -> None:
        internet = make_internet()
        asker = round_trips.RoundTrips(internet.network())
        others = [internet.network() for _ in range(5)]
        for other in others:
            await round_trips.RoundTrips(other).serve()
        for other in (others[0], *others):
            await asker.measure_s(other.peer_id, timeout_s=5)
        assert list(asker._known) == [other.peer_id for other in others[-3:]]
        await internet.close()

    virtual_time.run(main())


@in_virtual_time
async def test_round_trip_shown_by_traffic_is_known_without_a_ping() -> None:
    internet = make_internet()
    here, there = internet.network(), internet.network()
    asker = round_trips.RoundTrips(here)
    assert asker.known_s(there.peer_id) is None
    for seconds in (0.3, 0.2, 0.4):
        here.links.answered(there.peer_id, seconds)
    assert asker.known_s(there.peer_id) == 0.2
    await asyncio.sleep(round_trips.KEPT_S + 1)
    assert asker.known_s(there.peer_id) is None
    await internet.close()


@in_virtual_time
async def test_round_trips_to_a_set_come_nearest_first_and_without_the_dead_and_the_silent() -> None:
    internet = make_internet()
    a, near, far, dead, silent = (internet.network() for _ in range(5))
    internet.link(a.peer_id, near.peer_id, LinkModel(latency_s=0.002))
    internet.link(a.peer_id, far.peer_id, LinkModel(latency_s=0.1))

    async def never(_peer_id: str, _request: bytes) -> bytes:
        await asyncio.Event().wait()
        return b""

    await silent.serve(round_trips.PING_METHOD, never)
    async with Membership(a) as at_a, Membership(near), Membership(far):
        internet.crash(dead.peer_id)
        everyone = [far.peer_id, dead.peer_id, near.peer_id, silent.peer_id, a.peer_id, far.peer_id]
        assert at_a.known_rtts_ms([far.peer_id]) == {}
        start_s = asyncio.get_running_loop().time()
        found = await at_a.rtts_ms(everyone, timeout_s=2)
        assert asyncio.get_running_loop().time() - start_s < 2.1  # all at once, and all pings of one within the time
        assert list(found.items()) == [
            (near.peer_id, pytest.approx(4, abs=1)),
            (far.peer_id, pytest.approx(200, abs=1)),
        ]
        assert await at_a.rtts_ms(everyone, max_peers=1, timeout_s=2) == {near.peer_id: found[near.peer_id]}
        assert at_a.known_rtts_ms(everyone) == {a.peer_id: 0.0, **found}
        assert sorted(at_a.all_known_rtts_s()) == [rtt_ms / 1e3 for rtt_ms in found.values()]
        await asyncio.sleep(round_trips.LIFETIME_S + 1)
        assert at_a.known_rtts_ms([near.peer_id]) == {near.peer_id: found[near.peer_id]}  # old, but better than none
        await asyncio.sleep(round_trips.KEPT_S)
        assert at_a.known_rtts_ms([near.peer_id]) == {}
        assert at_a.all_known_rtts_s() == []
    await internet.close()


@in_virtual_time
async def test_peer_is_not_silent_whose_ping_waits_behind_bytes_that_still_come() -> None:
    internet = make_internet()
    here, there = internet.network(), internet.network()

    async def never(_peer_id: str, _request: bytes) -> bytes:
        await asyncio.Event().wait()
        return b""

    await there.serve(round_trips.PING_METHOD, never)
    pings = round_trips.RoundTrips(here)
    here.links.heard(there.peer_id)
    assert await pings.silent([there.peer_id], timeout_s=6) == {there.peer_id}
    asyncio.get_running_loop().call_later(2, here.links.heard, there.peer_id)
    assert await pings.silent([there.peer_id], timeout_s=6) == {there.peer_id}, "it may have stopped since"
    asyncio.get_running_loop().call_later(4, here.links.heard, there.peer_id)
    assert await pings.silent([there.peer_id], timeout_s=6) == set()
    await internet.close()


@in_virtual_time
async def test_defect_in_a_ping_is_raised_and_does_not_read_as_an_answer() -> None:
    async def call(*_: object, **__: object) -> bytes:
        raise RuntimeError("a defect")

    internet = make_internet()
    network = internet.network()
    pings = round_trips.RoundTrips(network)
    with patch.object(network, "call", call), pytest.raises(ExceptionGroup) as raised:
        await pings.silent(["a", "b"], timeout_s=1)
    assert raised.group_contains(RuntimeError, match="a defect")
    await internet.close()


@in_virtual_time
async def test_round_trips_to_very_many_are_measured_a_few_at_a_time_until_all_are_known() -> None:
    internet = make_internet()
    num_peers, num_pings = round_trips.MAX_MEASURED_AT_ONCE * 3, 0

    async def pong(_peer_id: str, _request: bytes) -> bytes:
        nonlocal num_pings
        num_pings += 1
        return b""

    others = [internet.network() for _ in range(num_peers)]
    for other in others:
        await other.serve(round_trips.PING_METHOD, pong)
    peer_ids = [other.peer_id for other in others]
    async with Membership(internet.network()) as membership:
        for turn in (1, 2, 3, 3):
            assert len(await membership.rtts_ms(peer_ids)) == min(
                turn * round_trips.MAX_MEASURED_AT_ONCE, limits.MAX_RTT_PEERS
            )
            assert num_pings == turn * round_trips.MAX_MEASURED_AT_ONCE * round_trips.NUM_PINGS
        assert len(membership.known_rtts_ms(peer_ids)) == num_peers
    await internet.close()


@in_virtual_time
async def test_ping_with_a_payload_is_a_violation() -> None:
    internet = make_internet()
    a, b = internet.network(), internet.network()
    async with Membership(b):
        await asyncio.sleep(0)
        with pytest.raises(PeerViolation):
            await a.call(b.peer_id, round_trips.PING_METHOD, b"x", timeout_s=5)
    await internet.close()


@in_virtual_time
async def test_cancelled_context_leaves_no_record_and_no_task() -> None:
    internet = make_internet()
    a, b = internet.network(), internet.network()

    async def live() -> None:
        async with Membership(a) as at_a:
            at_a.announce(node_record("a"))
            await asyncio.Event().wait()

    async with Membership(b) as at_b:
        living = asyncio.create_task(live())
        await asyncio.sleep(SEEN_S)
        living.cancel()
        with pytest.raises(asyncio.CancelledError):
            await living
        assert (await at_b.nodes())[a.peer_id].state == "leaving"
        # and once more, cancelled again while it leaves: virtual_time.run fails on what remains
        c = internet.network()
        hurried = Membership(c)

        async def hurry() -> None:
            async with hurried:
                hurried.announce(node_record("c"))
                await asyncio.sleep(SEEN_S)

        task = asyncio.create_task(hurry())
        await asyncio.sleep(SEEN_S + LATENCY_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await internet.close()


def test_twenty_nodes_find_each_other_half_die_and_a_partition_heals() -> None:
    async def main() -> None:
        internet = make_internet()
        swarm = [internet.network() for _ in range(20)]
        memberships = [Membership(network) for network in swarm]
        async with AsyncExitStack() as running:
            for membership in memberships:
                await running.enter_async_context(membership)
            for index, membership in enumerate(memberships):
                membership.announce(node_record(f"node-{index}"))
            await asyncio.sleep(SEEN_S)
            for membership in memberships:
                assert len(await membership.nodes()) == 20
            for network in swarm[10:]:
                internet.crash(network.peer_id)
            await asyncio.sleep(limits.RECORD_LIFETIME_S)
            for membership in memberships[:10]:
                assert len(await membership.nodes()) == 10
            internet.partition([[network.peer_id for network in swarm[:5]]])
            await asyncio.sleep(limits.RECORD_LIFETIME_S)
            for membership in memberships[:10]:
                assert len(await membership.nodes()) == 5
            internet.heal()
            for membership in memberships[:10]:
                assert len(await membership.nodes()) == 10
        await internet.close()

    virtual_time.run(main())


@in_virtual_time
async def test_made_up_models_do_not_displace_one_that_several_nodes_serve() -> None:
    internet = make_internet()
    liars, honest = [internet.network() for _ in range(9)], [internet.network() for _ in range(2)]
    for index, network in enumerate([*liars, *honest]):
        names = ("tiny",) if network in honest else tuple(f"a{index}{place}" for place in range(8))
        record = replace(node_record("node"), models=names)
        await network.publish(publish_key(record, network.peer_id), record.to_bytes(), lifetime_s=60)
    models = await Membership(honest[0]).models()
    assert len(models) == membership_module.MAX_LISTED_MODELS
    assert "tiny" in models
    await internet.close()


def test_record_without_room_under_a_full_key_is_listed_from_the_key_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_module, "FULL_RECORDS", 2)
    plain, root = MemoryNetwork.publish, lookup_key("nodes")

    async def publish(network: MemoryNetwork, key: str, payload: bytes, *, lifetime_s: float) -> bool:
        others = [each for each in await network.lookup([key], timeout_s=1) if each.peer_id != network.peer_id]
        is_full = key == root and len(others) >= 2
        return not is_full and await plain(network, key, payload, lifetime_s=lifetime_s)

    monkeypatch.setattr(MemoryNetwork, "publish", publish)

    async def main() -> None:
        internet = make_internet()
        networks = [internet.network() for _ in range(6)]
        async with AsyncExitStack() as stack:
            members = [await stack.enter_async_context(Membership(network)) for network in networks]
            for index, member in enumerate(members):
                member.announce(node_record(f"n{index}"))
                await asyncio.sleep(1)
            await asyncio.sleep(SEEN_S)
            assert len(await networks[0].lookup([root], timeout_s=1)) < 6
            assert set(await members[0].nodes()) == {network.peer_id for network in networks}
        await internet.close()

    virtual_time.run(main())


@in_virtual_time
async def test_record_that_first_found_no_peer_in_reach_is_published_where_all_look_for_it() -> None:
    """It is offered to longer keys while no peer is in reach, and nobody reads these unless the first key is full."""
    internet = make_internet()
    a, b = counting(internet.network()), internet.network()
    internet.partition([[a.peer_id], [b.peer_id]])
    plain = a.publish

    async def publish(key: str, payload: bytes, *, lifetime_s: float) -> bool:
        if key != lookup_key("nodes"):
            internet.heal()
        return await plain(key, payload, lifetime_s=lifetime_s)

    a.publish = publish  # type: ignore[method-assign]
    async with Membership(a) as at_a, Membership(b) as at_b:
        at_a.announce(node_record("a"))
        await asyncio.sleep(SEEN_S)
        at_a.announce(node_record("renamed"))
        await asyncio.sleep(SEEN_S)
        assert (await at_b.nodes())[a.peer_id].name == "renamed"
        assert [key for _, key in a.publishes[2:]] == [lookup_key("nodes")] * 2
    await internet.close()


def test_crowded_name_does_not_hide_another_one_below_its_full_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership_module, "FULL_RECORDS", 2)
    monkeypatch.setattr(membership_module, "MAX_LISTED_PEERS", 3)

    async def main() -> None:
        internet = make_internet()

        async def publish(model: str, depth: int) -> str:
            network, record = internet.network(), serve_record(model=model)
            key = publish_key(record, network.peer_id, depth)
            await network.publish(key, record.to_bytes(), lifetime_s=60)
            return network.peer_id

        for depth in (0, 0, 0, 0, 1):
            await publish("crowded", depth)
        honest = {await publish("tiny", depth) for depth in (0, 0, 1)}
        found = await Membership(internet.network()).all_servers(["crowded", "tiny"])
        assert set(found["tiny"]) == honest
        assert len(found["crowded"]) == 3
        await internet.close()

    virtual_time.run(main())


@in_virtual_time
async def test_sample_of_trainers_is_bounded_and_of_a_small_run_has_all() -> None:
    internet = make_internet()
    peers = [internet.network() for _ in range(MAX_SAMPLED + 10)]
    async with AsyncExitStack() as stack:
        for number, peer in enumerate(peers):
            membership = await stack.enter_async_context(Membership(peer))
            membership.announce(trainer_record("large"))
            if number < 3:
                membership.announce(trainer_record("small"))
        await asyncio.sleep(SEEN_S)
        asker = await stack.enter_async_context(Membership(internet.network()))
        for _ in range(2):
            assert len(await asker.some_trainers("large")) == MAX_SAMPLED
        assert set(await asker.some_trainers("small")) == {peer.peer_id for peer in peers[:3]}
        assert len(await asker.trainers("large")) == len(peers)  # a caller that wants all of them gets them
    await internet.close()
