"""Tests which invitations and vouches a state honours, what it keeps of them, and that a ring of fresh keys gains
little."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import count, islice
from typing import Any

import pytest
from swarm.training.run.run_config import RunConfig
from swarm.training.run.settings import ImpossibleRun
from swarm.training.standing.entrance import MAX_ALL_REVOKED, MAX_ENTRIES, MAX_SERIALS, Entrance, Entry, Probation
from swarm.training.standing.standings import MAX_AWAY, Register, TrainerStandings
from swarm_protocol.identity import Identity
from swarm_protocol.limits import MAX_CREDENTIALS
from swarm_protocol.run_credentials import Grant, RunRevocation

PEERS = sorted(Identity(bytes([number]) * 32).peer_id for number in range(30))
MEMBERS, NEW = PEERS[:6], PEERS[6:]
RULE = Entrance(welcomes=True, vouchers=2, vouch_budget=1, vouch_steps=10, vouch_credits=4)
STANDINGS = TrainerStandings(
    rule=Probation(steps=4, absence_steps=100),
    entrance=RULE,
    known=MEMBERS,
    outer_step=20,
    register=Register(credits=dict.fromkeys(MEMBERS, 20)),
)


def keeping(standings: TrainerStandings, **fields: Any) -> TrainerStandings:
    """Return the standings with these fields of the register changed."""
    return replace(standings, register=replace(standings.register, **fields))


def invited(peer: str, serial: int = 7, max_uses: int = 1) -> Grant:
    return Grant(peer_id=peer, serial=serial, max_uses=max_uses)


def vouched(peer: str, *vouchers: str) -> Grant:
    return Grant(peer_id=peer, vouchers=tuple(sorted(vouchers)))


def enter(standings: TrainerStandings, *grants: Grant, trainers: tuple[str, ...] = ()) -> TrainerStandings:
    """Return the standings after a step to which all known trainers contribute, and with which the peers of `grants`
    enter."""
    shown = standings.honoured({each.peer_id: each for each in grants})
    here = {*standings.known, *shown, *trainers}
    used = set(standings.known)
    register = standings.register_after(here, used, num_steps=1, grants=shown)
    return replace(
        standings,
        known=here,
        left=dict(standings.after(here, used, grants=shown)),
        outer_step=standings.outer_step + 1,
        register=register,
    )


def test_newcomer_counts_fully_at_once_with_an_invitation_and_is_on_probation_without() -> None:
    assert STANDINGS.steps_left(NEW[0], invited(NEW[0])) == 0
    assert STANDINGS.steps_left(NEW[0]) == 4
    later = enter(STANDINGS, invited(NEW[0]), trainers=(NEW[1],))
    assert [later.steps_left(peer) for peer in NEW[:2]] == [0, 4]
    assert later.register.entries == (Entry(peer_id=NEW[0], step=21, serial=7),)


def test_run_may_shorten_probation_of_invited_newcomers_or_ignore_invitations() -> None:
    shorter = replace(STANDINGS, entrance=replace(RULE, steps=2))
    assert shorter.steps_left(NEW[0], invited(NEW[0])) == 2
    assert replace(shorter, outer_step=1).steps_left(NEW[0], invited(NEW[0])) == 1
    closed = replace(STANDINGS, entrance=Entrance())
    assert closed.steps_left(NEW[0], invited(NEW[0])) == 4
    assert closed.steps_left(NEW[0], vouched(NEW[0], *MEMBERS[:2])) == 4


def test_run_that_requires_invitations_refuses_uninvited_peers_that_it_neither_names_nor_knows() -> None:
    strict = replace(STANDINGS, entrance=replace(RULE, required=True, listed=tuple(NEW[5:6])))
    assert strict.refuses(NEW[0])
    assert not strict.refuses(NEW[0], invited(NEW[0]))
    assert not strict.refuses(NEW[0], vouched(NEW[0], *MEMBERS[:2]))
    assert not any(strict.refuses(peer) for peer in (*MEMBERS, NEW[5]))
    away = replace(strict, known=MEMBERS[1:])
    assert not away.refuses(MEMBERS[0]), "an absent member with credits is remembered"
    assert strict.without_refused(PEERS, {NEW[1]: invited(NEW[1])}) == (*MEMBERS, NEW[1], NEW[5])
    assert not STANDINGS.refuses(NEW[0])


def test_invitation_admits_at_most_its_max_uses_even_within_one_group() -> None:
    grants = {peer: invited(peer, max_uses=2) for peer in NEW[:4]}
    assert STANDINGS.overused(grants) == NEW[2:4]
    used = enter(STANDINGS, *grants.values())
    assert [each.peer_id for each in used.register.entries] == NEW[:2]
    assert used.steps_left(NEW[2], grants[NEW[2]]) == 4, "the invitation is used up"
    assert used.steps_left(NEW[2], invited(NEW[2], serial=8)) == 0
    gone = keeping(replace(used, known=MEMBERS), credits={})
    assert gone.steps_left(NEW[0], grants[NEW[0]]) == 0, "a peer that has used the invitation may use it again"


def test_vouches_count_when_enough_members_of_full_standing_give_them() -> None:
    assert STANDINGS.steps_left(NEW[0], vouched(NEW[0], *MEMBERS[:2])) == 0
    assert STANDINGS.steps_left(NEW[0], vouched(NEW[0], MEMBERS[0])) == 4, "one vouch too few"
    assert STANDINGS.steps_left(NEW[0], vouched(NEW[0], MEMBERS[0], *NEW[1:4])) == 4, (
        "vouches of strangers do not count"
    )
    doubtful = replace(STANDINGS, left={MEMBERS[1]: 1})
    assert doubtful.steps_left(NEW[0], vouched(NEW[0], *MEMBERS[:2])) == 4, "one voucher is on probation"
    idle = keeping(STANDINGS, credits={**STANDINGS.register.credits, MEMBERS[1]: 3})
    assert idle.steps_left(NEW[0], vouched(NEW[0], *MEMBERS[:2])) == 4, "one voucher has not contributed enough"
    away = replace(STANDINGS, known=MEMBERS[1:])
    assert away.steps_left(NEW[0], vouched(NEW[0], *MEMBERS[:2])) == 4, "one voucher is away"


def test_member_vouches_only_within_its_budget_of_steps() -> None:
    first, second = vouched(NEW[0], *MEMBERS[:2]), vouched(NEW[1], *MEMBERS[1:3])
    assert STANDINGS.overused({each.peer_id: each for each in (first, second)}) == [NEW[1]]
    used = enter(STANDINGS, first)
    assert used.steps_left(NEW[1], second) == 4, "one of its vouchers has no vouch left"
    assert used.steps_left(NEW[1], vouched(NEW[1], *MEMBERS[2:4])) == 0
    assert replace(used, outer_step=30).steps_left(NEW[1], second) == 4
    assert replace(used, outer_step=31).steps_left(NEW[1], second) == 0


def test_ring_of_fresh_keys_gains_nothing_by_vouching_before_it_has_contributed() -> None:
    """Two keys entered by a mistake of honest members. They vouch for more keys, which vouch for more at once."""
    standings = enter(STANDINGS, vouched(NEW[0], *MEMBERS[:2]), vouched(NEW[1], *MEMBERS[2:4]))
    for num_steps in range(4):
        assert standings.steps_left(NEW[2], vouched(NEW[2], *NEW[:2])) == 4, num_steps
        standings = enter(standings)
    assert standings.steps_left(NEW[2], vouched(NEW[2], *NEW[:2])) == 0, (
        "the keys have contributed to as many steps as a stranger must"
    )
    standings = enter(standings, vouched(NEW[2], *NEW[:2]))
    assert standings.steps_left(NEW[3], vouched(NEW[3], *NEW[:2])) == 4, "the budget of the first two keys is used up"
    assert standings.steps_left(NEW[3], vouched(NEW[3], NEW[1], NEW[2])) == 4


def test_vouchers_of_a_convicted_peer_are_on_probation_again_and_vouch_no_more() -> None:
    standings = enter(STANDINGS, vouched(NEW[0], *MEMBERS[:2]))
    assert standings.vouchers_of({NEW[0]}) == tuple(MEMBERS[:2])
    assert standings.vouchers_of({NEW[1], MEMBERS[0]}) == ()
    here, demoted = standings.known, MEMBERS[:2]
    assert standings.after(here, here, demoted=demoted) == ((MEMBERS[0], 4), (MEMBERS[1], 4))
    register = standings.register_after(here, here, num_steps=1, demoted=demoted)
    assert not register.credits.keys() & set(demoted), "a demoted member must lose its credits"
    assert register.entries == (), "the entry must go, so that its vouchers are demoted once"


def test_register_keeps_the_newest_entries_and_is_read_back_equal() -> None:
    serials = [Entry(peer_id=PEERS[0], step=1, serial=2**64 - 1), Entry(peer_id=PEERS[1], step=2, vouchers=(PEERS[3],))]
    register = Register(entries=tuple(serials))
    assert Register.from_json(register.to_json()) == register
    many = tuple(
        Entry(peer_id=Identity(number.to_bytes(32, "big")).peer_id, step=1, serial=number + 1)
        for number in range(MAX_ENTRIES)
    )
    full = keeping(STANDINGS, entries=many)
    kept = full.register_after(MEMBERS, (), num_steps=1, grants={}).entries
    assert kept == many
    kept = full.register_after(
        [*MEMBERS, NEW[0]], (), num_steps=1, grants={NEW[0]: invited(NEW[0], serial=9999)}
    ).entries
    assert (len(kept), kept[0], kept[-1].peer_id) == (MAX_ENTRIES, many[1], NEW[0])
    with pytest.raises(ValueError, match="too many"):
        Register(entries=(*many, *serials))
    for wrong, message in (
        ({"step": -1}, "step is -1, not"),
        ({"serial": 2**64}, "serial is 18446744073709551616, not"),
        ({"vouchers": (PEERS[1], PEERS[0])}, "not few, sorted and distinct"),
        ({"peer_id": "nobody"}, "'nobody' is not an Ed25519 peer id"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(serials[0], **wrong)  # type: ignore[arg-type]


def test_entrance_rule_follows_from_the_runs_settings() -> None:
    default = RunConfig(name="x").entrance
    assert (default.welcomes, default.required, default.vouchers) == (True, False, 0)
    named = RunConfig(name="x", admission=tuple(PEERS[:2]))
    assert (named.entrance.welcomes, named.only_named) == (False, tuple(PEERS[:2])), (
        "a run with a closed list takes no invitations by default"
    )
    both = RunConfig(name="x", admission=tuple(PEERS[:1]), invitations="required")
    assert (both.entrance.required, both.only_named, both.entrance.listed) == (True, (), tuple(PEERS[:1]))
    assert RunConfig(name="x", vouchers=2, probation_steps=7).entrance.vouch_credits == 7
    for wrong in (
        {"vouchers": 1, "absence_steps": 3},
        {"vouchers": 1, "invitations": "none"},
        {"vouchers": 5},
        {"invitations": "maybe"},
        {"inviters": ("nobody",)},
    ):
        with pytest.raises((ImpossibleRun, ValueError)):
            RunConfig(name="x", **wrong)  # type: ignore[arg-type]


def revoke(standings: TrainerStandings, revocation: RunRevocation) -> TrainerStandings:
    """Return the standings after a step with whose group the state takes `revocation`."""
    here = set(standings.known)
    register = standings.register_after(here, here, num_steps=1, revocation=revocation)
    return replace(
        standings,
        outer_step=standings.outer_step + 1,
        register=register,
    )


def test_revoked_invitation_admits_nobody_and_members_that_used_it_are_demoted() -> None:
    revocation = RunRevocation(run="run", serials=(7,))
    grant = invited(NEW[0], max_uses=2)
    assert STANDINGS.is_news(revocation)
    known = revoke(enter(STANDINGS, grant), revocation)
    assert not known.is_news(revocation)
    assert known.steps_left(NEW[1], invited(NEW[1], max_uses=2)) == 4
    assert known.to_demote(()) == (NEW[0],), "every member demotes the peer that entered by it"
    here = known.known
    assert known.after(here, here, demoted=known.to_demote(())) == ((NEW[0], 4),)
    register = known.register_after(here, here, num_steps=1, demoted=known.to_demote(()))
    assert NEW[0] not in register.credits
    assert (register.entries, register.revoked) == ((), (7,)), "the peer is demoted once"
    strict = replace(known, entrance=replace(RULE, required=True))
    assert strict.refuses(NEW[0])
    assert not strict.refuses(MEMBERS[0])


def test_revoked_inviter_admits_nobody() -> None:
    known = revoke(STANDINGS, RunRevocation(run="run", inviters=(MEMBERS[3],)))
    by_it, by_another = (replace(invited(NEW[0]), inviter=peer) for peer in MEMBERS[3:5])
    assert (known.steps_left(NEW[0], by_it), known.steps_left(NEW[0], by_another)) == (4, 0)


def test_uses_of_an_invitation_count_when_the_entries_of_its_users_are_forgotten() -> None:
    many = tuple(
        Entry(peer_id=Identity(number.to_bytes(32, "big")).peer_id, step=1, serial=number) for number in range(100, 611)
    )
    first = Entry(peer_id=PEERS[0], step=1, serial=7)
    full = keeping(STANDINGS, entries=(first, *many))
    after = full.register_after([*MEMBERS, NEW[0]], (), num_steps=1, grants={NEW[0]: invited(NEW[0], serial=9999)})
    assert first not in after.entries
    assert after.uses == {7: 1}
    assert Register.from_json(after.to_json()) == after
    known = keeping(full, entries=after.entries, uses=after.uses)
    assert known.steps_left(NEW[1], invited(NEW[1])) == 4, "the only use of the invitation is used up"
    assert known.steps_left(NEW[1], invited(NEW[1], max_uses=2)) == 0
    crowded = keeping(STANDINGS, uses=dict.fromkeys(range(1000, 1000 + MAX_SERIALS), 1))
    assert crowded.steps_left(NEW[0], invited(NEW[0])) == 4, "the register has no room to count another invitation"


def test_run_goes_on_when_the_count_of_used_invitations_is_full() -> None:
    newcomers = (Identity(number.to_bytes(32, "big")).peer_id for number in count(100))
    entries = tuple(
        Entry(peer_id=peer, step=1, serial=10_000 + number)
        for number, peer in enumerate(islice(newcomers, MAX_ENTRIES))
    )
    standings = keeping(STANDINGS, entries=entries, uses=dict.fromkeys(range(1000, 999 + MAX_SERIALS), 1))
    assert len(standings.register.uses) == MAX_SERIALS - 1, (
        "with room for one more serial, all of the next group may enter"
    )
    last_group = enumerate(islice(newcomers, MAX_CREDENTIALS))
    standings = enter(standings, *(invited(peer, serial=20_000 + number) for number, peer in last_group))
    for _ in range(MAX_ENTRIES // MAX_CREDENTIALS):
        group = islice(newcomers, MAX_CREDENTIALS)
        standings = enter(standings, *(invited(peer, serial=1000, max_uses=10_000) for peer in group))
    assert {each.serial for each in standings.register.entries} == {1000}, "all other entries are displaced and counted"
    assert len(standings.register.uses) == MAX_SERIALS - 1 + MAX_ENTRIES + MAX_CREDENTIALS


def test_register_is_computed_quickly_in_a_large_run_with_many_revoked_invitations() -> None:
    peers = [Identity(number.to_bytes(32, "big")).peer_id for number in range(100, 100 + MAX_AWAY)]
    entries = tuple(Entry(peer_id=peer, step=1, serial=10_000 + number) for number, peer in enumerate(peers))
    revoked = tuple(range(1, MAX_ALL_REVOKED + 1))
    standings = keeping(
        STANDINGS, entries=entries[:MAX_ENTRIES], revoked=revoked, credits=dict.fromkeys(sorted(peers), 20)
    )
    began_s = time.process_time()
    assert standings.register_after(MEMBERS, MEMBERS, num_steps=1).revoked == revoked
    assert time.process_time() - began_s < 1.0, "each revoked serial is compared with each entry of each trainer"


def test_register_forgets_no_revocation_and_is_read_back_equal() -> None:
    register = Register(revoked=(2**64 - 1, 5), revoked_inviters=(PEERS[1], PEERS[0]))
    assert Register.from_json(register.to_json()) == register
    full = keeping(STANDINGS, revoked=tuple(range(1, MAX_ALL_REVOKED + 1)))
    news = RunRevocation(run="run", serials=(9999,))
    assert not full.is_news(news), "an old revocation that is shown again would displace others"
    assert not full.knows(news)
    assert revoke(full, news).register.revoked == full.register.revoked
    for wrong, message in (
        ({"revoked": (0,)}, "revoked is 0, not"),
        ({"revoked_inviters": ("nobody",)}, "'nobody' is not an Ed25519 peer id"),
        ({"revoked": (1,) * (MAX_ALL_REVOKED + 1)}, "the revocations are too many"),
    ):
        with pytest.raises(ValueError, match=message):
            Register(**wrong)  # type: ignore[arg-type]


def test_run_describes_who_may_join_and_what_invitations_give() -> None:
    default = RunConfig(name="x").entrance
    assert default.who_may_join == "anyone may join"
    assert default.who_is_welcome(0) == "a node with an invitation from the author counts fully at once"
    closed = RunConfig(name="x", admission=tuple(PEERS[:2])).entrance
    assert (closed.who_may_join, closed.who_is_welcome(0)) == ("2 peers may join", "")
    vouching = RunConfig(
        name="x", invitations="required", vouchers=2, entry_steps=3, inviters=tuple(PEERS[:1])
    ).entrance
    assert vouching.who_may_join == "those with an invitation may join"
    assert vouching.who_is_welcome(1) == (
        "a node with an invitation from the author or 1 more, or 2 members that vouch for it, "
        "counts fully after 3 outer steps"
    )
    one = RunConfig(name="x", vouchers=1).entrance
    assert "or 1 member that vouches for it, counts" in one.who_is_welcome(0)
