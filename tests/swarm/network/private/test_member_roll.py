"""The rules of a private network, alone and on the memory network. `test_private_libp2p` has real hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from support.plain_records import node_record, serve_record
from support.private_networks import DAY_S, Owner
from swarm.network.interface import Stream
from swarm.network.memory.memory_network import EPOCH_S, MemoryInternet, MemoryNetwork
from swarm.network.private.member_roll import MemberRoll, right_to_answer, rights_to_call
from swarm.network.private.private_gate import method_of
from swarm.testing import virtual_time
from swarm_protocol.envelope import Envelope, seal_record
from swarm_protocol.errors import ConfigError, IntegrityError, PeerError, PeerRefused, PeerViolation
from swarm_protocol.identity import Identity
from swarm_protocol.network_invitation import NetworkInvitation, PrivateGreeting, Right
from swarm_protocol.records import Record, TrainerRecord, publish_key
from swarm_protocol.serving_messages import BACKWARD_METHOD, FILES_METHOD, FORWARD_METHOD, KV_METHOD
from swarm_protocol.session_frames import SESSION_METHOD
from swarm_protocol.version import Hello, software_version

NOW = 1_700_000_000.0
OWNER = Owner()
HELLO = Hello(network_id=OWNER.network_id, software_version=software_version())
A, B = Identity(bytes([31]) * 32), Identity(bytes([32]) * 32)


SERVE = serve_record(end=1, model="m", revision="1", num_blocks=1, free_kv_tokens=1)
TRAINER = TrainerRecord(run="r", outer_step=0, state="training")


def invited(*rights: Right, **options: Any) -> NetworkInvitation:
    return OWNER.invite(*rights, now=NOW, **options)


def roll(identity: Identity = A, *rights: Right, **options: Any) -> MemberRoll:
    return MemberRoll(invited(*rights), identity.peer_id, NOW, **options)


def met(*rights: Right) -> tuple[MemberRoll, NetworkInvitation]:
    """Return the roll of A, which B has shown an invitation with these rights."""
    invitation = invited(*rights)
    here = roll()
    here.take_in(B.peer_id, MemberRoll(invitation, B.peer_id, NOW).greeting(HELLO), NOW)
    return here, invitation


def record_of(signer: Identity, record: Record) -> Envelope:
    return seal_record(
        signer,
        network_id=OWNER.network_id,
        key=publish_key(record, signer.peer_id),
        payload=record.to_bytes(),
        issued_at=NOW,
        lifetime_s=60.0,
    )


def test_roll_knows_a_member_until_its_invitation_ends() -> None:
    here, _ = met("join", "ask")
    assert here.rights_of(B.peer_id, NOW) == {"join", "ask"}
    assert not here.has_ended(B.peer_id, NOW)
    assert here.rights_of(B.peer_id, NOW + DAY_S) == frozenset()
    assert here.has_ended(B.peer_id, NOW + DAY_S)
    assert here.rights_of(OWNER.identity.peer_id, NOW) == frozenset(), "nobody is a member without a chain"


def test_roll_drops_a_member_whose_invitation_is_revoked_and_refuses_it_again() -> None:
    here, invitation = met()
    newer = roll(Identity(bytes([33]) * 32), revocations=OWNER.revoke(invitation.terms.serial, now=NOW))
    here.take_in(newer.own.peer_id, newer.greeting(HELLO), NOW)
    assert here.has_ended(B.peer_id, NOW)
    with pytest.raises(PeerRefused, match="revoked"):
        here.take_in(B.peer_id, MemberRoll(invitation, B.peer_id, NOW).greeting(HELLO), NOW)
    assert here.has_ended(B.peer_id, NOW), "it must not count as a stranger, who may stay connected for longer"
    assert here.revocations == newer.revocations, "the list must be passed on"


def test_roll_keeps_the_list_with_the_highest_number_and_ignores_forged_ones(caplog: pytest.LogCaptureFixture) -> None:
    second, first = OWNER.revoke(5, number=2, now=NOW), OWNER.revoke(4, number=1, now=NOW)
    here = roll(revocations=second)
    for data in (first, Owner(seed=40).revoke(7, number=9, now=NOW), b"nonsense"):
        other = Identity.generate()
        greeting = roll(other).greeting(HELLO)
        here.take_in(other.peer_id, PrivateGreeting(hello=HELLO, chain=greeting.chain, revocations=data), NOW)
    assert (here.number, here.revocations) == (2, second)
    assert [each.levelname for each in caplog.records].count("WARNING") == 1, "a member could fill the log"


def test_roll_reports_when_the_node_s_own_invitation_ends() -> None:
    invitation = invited()
    with pytest.raises(ConfigError, match="revoked"):
        MemberRoll(invitation, A.peer_id, NOW, revocations=OWNER.revoke(invitation.terms.serial, now=NOW))
    with pytest.raises(ConfigError, match="expired"):
        MemberRoll(invitation, A.peer_id, NOW + DAY_S)
    with pytest.raises(ConfigError, match="in the future") as error:
        MemberRoll(invitation, A.peer_id, NOW - DAY_S)
    assert "set the clock" in error.value.remedy, "a new invitation would not help"
    here = MemberRoll(invitation, A.peer_id, NOW)
    assert here.trouble(NOW) is None
    assert "expired" in (here.trouble(NOW + DAY_S) or "")
    with pytest.raises(PeerRefused, match="expired"):
        here.check_own("ping", B.peer_id, NOW + DAY_S)


def test_roll_refuses_the_chain_of_another_peer() -> None:
    chain_of_b = MemberRoll(invited(), B.peer_id, NOW).greeting(HELLO)
    with pytest.raises((PeerViolation, IntegrityError), match="another node's"):
        roll().take_in(Identity.generate().peer_id, chain_of_b, NOW)


@pytest.mark.parametrize(
    ("method", "callers", "server"),
    [
        *((f"{name}/m", ("ask", "serve"), "serve") for name in (FILES_METHOD, SESSION_METHOD, KV_METHOD)),
        *((f"{name}/m", ("ask", "serve"), "serve") for name in (FORWARD_METHOD, BACKWARD_METHOD)),
        *(
            (f"train.{name}/r", ("train",), "train")
            for name in ("alive", "ready", "vote", "reduce", "chunk", "manifest")
        ),
        *((f"train.{name}/r", ("join",), "train") for name in ("standing", "history", "run_file")),
        ("ping", ("join",), "join"),
        ("", ("join",), "join"),
    ],
)
def test_method_needs_these_rights(method: str, callers: tuple[Right, ...], server: Right) -> None:
    assert rights_to_call(method) == callers
    assert right_to_answer(method) == server


def test_method_of_a_protocol() -> None:
    prefix = f"/swarm/4/{OWNER.network_id}"
    assert method_of(f"{prefix}/call/serving.files/OWNER/NAME") == "serving.files/OWNER/NAME"
    assert method_of(f"{prefix}/stream/train.reduce/r") == "train.reduce/r"
    assert method_of(f"{prefix}/bulk/ping") == "ping"
    for own in (f"{prefix}/dht/find", f"{prefix}/resume/", f"{prefix}/parcel/", "/libp2p/circuit/relay/0.2.0/hop"):
        assert method_of(own) == ""


@pytest.mark.parametrize(
    ("record", "right"),
    [
        (SERVE, "serve"),
        (TRAINER, "train"),
        (node_record(models=("m",)), "serve"),
        (node_record(runs=("r",)), "train"),
        (node_record(), "join"),
    ],
)
def test_record_is_stored_and_accepted_only_with_its_right(record: Record, right: Right) -> None:
    envelope = record_of(B, record)
    having, _ = met("join", right)
    assert having.may_store(B.peer_id, envelope, NOW)
    assert not having.may_store(A.peer_id, envelope, NOW), "nobody may store another's record"
    assert having.believes(envelope, NOW)
    if right != "join":
        lacking, _ = met(*({"join", "serve", "train", "ask"} - {right}))  # type: ignore[arg-type]
        assert not lacking.may_store(B.peer_id, envelope, NOW)
        assert not lacking.believes(envelope, NOW)
    assert not roll().may_store(B.peer_id, envelope, NOW), "a stranger must not store anything"


# --- on the memory network -----------------------------------------------------------------------------------------


def simulated(case: Callable[[MemoryInternet], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        internet = MemoryInternet(seed=1)
        await case(internet)
        await internet.close()

    virtual_time.run(main())


def now() -> float:
    return EPOCH_S + asyncio.get_running_loop().time()


def member(internet: MemoryInternet, *rights: Right, **options: Any) -> MemoryNetwork:
    return internet.network(invitation=OWNER.invite(*rights, now=now(), **options))


async def echo(_peer_id: str, request: bytes) -> bytes:
    return request


def test_memory_network_answers_only_members() -> None:
    async def case(internet: MemoryInternet) -> None:
        a, b = member(internet), member(internet)
        stranger = internet.network(network_id=OWNER.network_id)
        other = internet.network(invitation=Owner(seed=50).invite(now=now()))
        await a.serve("echo", echo)
        assert await b.call(a.peer_id, "echo", b"x", timeout_s=5) == b"x"
        assert await b.publish("notes", b"text", lifetime_s=60.0)
        assert len(await a.lookup(["notes"], timeout_s=5)) == 1
        for outsider in (stranger, other):
            with pytest.raises(PeerRefused):
                await outsider.call(a.peer_id, "echo", b"x", timeout_s=5)
            assert await outsider.lookup(["notes"], timeout_s=5) == []
            assert not await outsider.publish("notes", b"forged", lifetime_s=60.0)

    simulated(case)


def test_memory_network_enforces_rights_and_expiry() -> None:
    async def case(internet: MemoryInternet) -> None:
        server, watcher = member(internet), member(internet, "join", lifetime_s=100.0)

        async def take(_peer_id: str, stream: Stream) -> None:
            await stream.send(b"answer")

        await server.serve_stream("serving.lane/m", take)
        await server.serve("train.standing/r", echo)
        with pytest.raises(PeerRefused, match="right to ask"):
            async with watcher.stream(server.peer_id, "serving.lane/m", timeout_s=5):
                pass
        assert await watcher.call(server.peer_id, "train.standing/r", b"x", timeout_s=5) == b"x"
        key = publish_key(SERVE, watcher.peer_id)
        assert not await watcher.publish(key, SERVE.to_bytes(), lifetime_s=60.0)
        assert await server.lookup([key], timeout_s=5) == []
        await asyncio.sleep(101.0)  # seconds of virtual time
        with pytest.raises(PeerError, match="expired"):
            await watcher.call(server.peer_id, "train.standing/r", b"x", timeout_s=5)

    simulated(case)
