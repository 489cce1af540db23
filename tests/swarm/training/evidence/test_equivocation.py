"""Tests which two statements about one attempt convict their signer, and which do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.training_swarm import config, placed_votes
from support.wrong_reduction import IDENTITIES, NOW, signatures
from swarm.training.evidence.equivocation import MAX_PEERS, MAX_STATEMENTS, EquivocationWatch
from swarm.training.evidence.evidence import accused, check
from swarm_protocol.commit_messages import Certificate, Lock, Outcome
from swarm_protocol.errors import IntegrityError, PeerViolation
from swarm_protocol.proof_messages import EQUIVOCATION, Equivocation, StatedReport, StatedVote
from swarm_protocol.training_messages import Contribution, Group, Ready, SignedGroup

RUN = config(min_group=2)
LIAR, *OTHERS = IDENTITIES
PEERS = tuple(each.peer_id for each in IDENTITIES)
STATE = b"s" * 32


def signed_group(**changes: object) -> SignedGroup:
    values: dict[str, object] = {
        "run": "run",
        "step": 5,
        "attempt": 2,
        "state_digest": STATE,
        "members": tuple(Contribution(peer_id=peer) for peer in PEERS),
        "reduce_s": 10.0,
        "vote_s": 10.0,
    }
    return signatures(LIAR).sign_group(Group(**{**values, **changes}), NOW)  # type: ignore[arg-type]


GROUP = signed_group()


def outcome(name: bytes = b"o") -> Outcome:
    return Outcome(origin_digest=GROUP.digest, part_digests=(), state_digest=name * 32)


def vote(name: bytes = b"o", **changes: object) -> bytes:
    cast = replace(GROUP.vote(outcome(name), "prepare"), **changes)  # type: ignore[arg-type]
    return StatedVote.of(signatures(LIAR).sign_vote(cast)).to_bytes()


def report(loss: float = 1.0, attempt: int = 2) -> bytes:
    ready = Ready(run="run", step=5, attempt=attempt, state_digest=STATE, num_tokens=8, num_samples=2, loss=loss)
    stated = signatures(LIAR).sign_report(ready).contribution_of(LIAR.peer_id)
    return StatedReport(step=5, attempt=attempt, state_digest=STATE, report=stated).to_bytes()


def case(first: bytes, second: bytes, statement: str = "vote") -> Equivocation:
    return Equivocation(statement=statement, peer=LIAR.peer_id, first=first, second=second)  # type: ignore[arg-type]


CONVICTING: dict[str, Equivocation] = {
    "two outcomes": case(vote(), vote(b"p")),
    "two groups": case(vote(), vote(group_digest=bytes(32))),
    "two commit votes": case(vote(kind="commit"), vote(b"p", kind="commit")),
    "two reports": case(report(), report(2.0), "report"),
    "two groups as coordinator": case(GROUP.data, signed_group(vote_s=11.0).data, "group"),
}


@pytest.mark.parametrize("name", CONVICTING)
def test_two_statements_about_one_attempt_convict_their_signer(name: str) -> None:
    evidence = CONVICTING[name].evidence()
    assert accused(evidence, signatures()) == (LIAR.peer_id, 5)
    verdict = check(evidence, signatures(), RUN)
    assert (verdict.peer_id, verdict.step, verdict.kind) == (LIAR.peer_id, 5, EQUIVOCATION)
    assert "attempt 2 at outer step 5" in verdict.reason
    if "coordinator" not in name:
        assert len(evidence.to_bytes()) < 700, "evidence is small"


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        (case(vote(), vote()), "one statement twice"),
        (case(report(), report(), "report"), "one statement twice"),
        (case(vote(), vote(b"p", attempt=3)), "different attempts"),
        (case(vote(), vote(b"p", step=6)), "different attempts"),
        (case(vote(), vote(b"p", kind="commit")), "different attempts"),
        (case(vote(), vote(b"p", state_digest=bytes(32))), "different attempts"),
        (case(vote(), vote(b"p", sequence=1)), "different attempts"),
        (case(report(), report(2.0, attempt=3), "report"), "different attempts"),
        (case(GROUP.data, signed_group(attempt=3, vote_s=11.0).data, "group"), "different attempts"),
        (case(GROUP.data, signed_group(order=b"of the author").data, "group"), "different attempts"),
        (case(vote(), vote(b"p", run="another")), "signature"),
        (replace(case(vote(), vote(b"p")), peer=OTHERS[0].peer_id), "signature"),
        (replace(case(report(), report(2.0), "report"), peer=OTHERS[0].peer_id), "another member"),
        (replace(case(GROUP.data, signed_group(vote_s=11.0).data, "group"), peer=OTHERS[0].peer_id), "another member"),
        (case(vote(), report()), "."),
        (case(GROUP.data, GROUP.data[:-1], "group"), "."),
    ],
)
def test_pair_of_statements_that_an_honest_member_may_sign_convicts_nobody(shown: Equivocation, why: str) -> None:
    with pytest.raises((PeerViolation, IntegrityError), match=why):
        check(shown.evidence(), signatures(), RUN)


@pytest.mark.parametrize("evidence", CONVICTING.values(), ids=CONVICTING)
def test_statements_convict_nobody_in_another_run_or_network_or_in_runs_of_single_survivors(
    evidence: Equivocation,
) -> None:
    for reader in (signatures(run="other"), signatures(network="other")):
        with pytest.raises((PeerViolation, IntegrityError)):
            check(evidence.evidence(), reader, RUN)
    with pytest.raises(PeerViolation, match="min_group of 1"):
        check(evidence.evidence(), signatures(), config(min_group=1))


# --- the watch --------------------------------------------------------------------------------------------------------


def watching(note: Callable[[EquivocationWatch], None], me: str = OTHERS[2].peer_id) -> list[Equivocation]:
    found = list[Equivocation]()
    note(EquivocationWatch(me, found.append, lambda peer: peer in PEERS))
    for each in found:
        check(each.evidence(), signatures(), RUN)
    return found


def cast(name: bytes, attempt: int = 2) -> object:
    return signatures(LIAR).sign_vote(replace(GROUP.vote(outcome(name), "prepare"), attempt=attempt))


def lock_of(name: bytes) -> Lock:
    signers = [signatures(each) for each in (LIAR, *OTHERS[:2])]
    votes = placed_votes(GROUP.vote(outcome(name), "prepare"), signers, PEERS)
    return Lock(attempt=2, group_digest=GROUP.digest, outcome=outcome(name), votes=votes)


def test_watch_reports_two_votes_once_from_any_source() -> None:
    def directly(watch: EquivocationWatch) -> None:
        for name in (b"o", b"o", b"p", b"q"):
            watch.vote(LIAR.peer_id, cast(name))  # type: ignore[arg-type]

    def in_locks(watch: EquivocationWatch) -> None:
        watch.lock(lock_of(b"o"), GROUP, PEERS)
        watch.lock(lock_of(b"p"), GROUP, PEERS)

    def in_certificates(watch: EquivocationWatch) -> None:
        for name in (b"o", b"p"):
            votes = placed_votes(GROUP.vote(outcome(name), "commit"), [signatures(LIAR)], PEERS)
            watch.certificate(Certificate(group=GROUP.data, outcome=outcome(name), votes=votes), GROUP)

    assert [each.peer for each in watching(directly)] == [LIAR.peer_id]
    assert {each.peer for each in watching(in_locks)} == {LIAR.peer_id, *(each.peer_id for each in OTHERS[:2])}
    assert [each.peer for each in watching(in_certificates)] == [LIAR.peer_id]


def test_watch_reports_two_groups_and_two_reports_of_others_but_never_of_its_own_member() -> None:
    def groups(watch: EquivocationWatch) -> None:
        watch.group(GROUP)
        watch.group(signed_group(vote_s=11.0))

    def reports(watch: EquivocationWatch) -> None:
        for loss in (1.0, 1.0, 2.0):
            ready = Ready(run="run", step=5, attempt=2, state_digest=STATE, num_tokens=8, num_samples=2, loss=loss)
            watch.report(LIAR.peer_id, signatures(LIAR).sign_report(ready))

    assert [each.statement for each in watching(groups)] == ["group"]
    assert [each.statement for each in watching(reports)] == ["report"]
    assert watching(reports, me=LIAR.peer_id) == []


def test_watch_forgets_only_a_members_own_statements_when_it_makes_very_many() -> None:
    def flooded(watch: EquivocationWatch) -> None:
        honest = signatures(OTHERS[0])
        watch.vote(OTHERS[0].peer_id, honest.sign_vote(GROUP.vote(outcome(), "prepare")))
        for attempt in range(MAX_STATEMENTS + 2):
            watch.vote(LIAR.peer_id, cast(b"o", attempt))  # type: ignore[arg-type]
        watch.vote(LIAR.peer_id, cast(b"p", 0))  # type: ignore[arg-type]
        watch.vote(OTHERS[0].peer_id, honest.sign_vote(GROUP.vote(outcome(b"p"), "prepare")))

    assert [each.peer for each in watching(flooded)] == [OTHERS[0].peer_id]


def test_watch_forgets_no_statement_of_a_member_because_of_strangers() -> None:
    def flooded(watch: EquivocationWatch) -> None:
        watch.vote(LIAR.peer_id, cast(b"o"))  # type: ignore[arg-type]
        for number in range(MAX_PEERS + 1):
            watch.vote(f"stranger {number}", cast(b"o"))  # type: ignore[arg-type]
        watch.vote(LIAR.peer_id, cast(b"p"))  # type: ignore[arg-type]

    assert [each.peer for each in watching(flooded)] == [LIAR.peer_id]
