"""What locks and signed reports cost a member of a round: CPU seconds for signatures, and bytes of groups and votes.

make bench                                             # or alone:
.venv/bin/python -m pytest tests/bench/test_bench_locks.py -m bench -s
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from bench.report import Report
from support.training_swarm import certificate_of, placed_votes
from swarm.training.round.quorum import Succession
from swarm.training.state.certificate import RunSignatures
from swarm_protocol import identity as identity_module
from swarm_protocol.commit_messages import Lock, Outcome
from swarm_protocol.identity import Identity
from swarm_protocol.training_messages import Contribution, Group, SignedGroup

pytestmark = pytest.mark.bench

NOW = 1_750_000_000.0
MOST_CPU_S = {5: 0.25, 16: 0.25, 256: 0.5}
"""A twentieth of an outer step of 5 s, and of 10 s for 256 members, who reduce a large vector."""


@pytest.mark.parametrize("num_members", MOST_CPU_S)
def test_bench_signatures_take_little_of_a_step(num_members: int) -> None:
    signers = sorted(
        (
            RunSignatures(
                identity=Identity(number.to_bytes(32, "big")),
                network_id="bench",
                run="run",
                succession=Succession(min_group=2),
            )
            for number in range(1, num_members + 1)
        ),
        key=lambda each: each.identity.peer_id,
    )
    peers = tuple(each.identity.peer_id for each in signers)
    signed = signed_group(signers)
    parts = (bytes(32),) * num_members
    outcome = Outcome(origin_digest=signed.digest, part_digests=parts, state_digest=bytes(32))
    first = signed.vote(outcome, "prepare")
    second = replace(first, kind="commit")
    votes = [each.sign_vote(vote) for vote in (first, second) for each in signers]
    certificate = certificate_of(signed, outcome, signers)
    lock = Lock(attempt=0, group_digest=signed.digest, outcome=outcome, votes=placed_votes(first, signers, peers))
    me = signers[0]
    identity_module._check_signature_cached.cache_clear()

    def cpu_s(*works: object) -> float:
        since = time.process_time()
        for work in works:
            work()  # type: ignore[operator]
        return time.process_time() - since

    sign_s = cpu_s(lambda: me.sign_vote(first), lambda: me.sign_vote(second))
    reports_s = cpu_s(lambda: me.check_reports(signed))
    votes_s = cpu_s(
        *((lambda vote=vote, peer=peers[n % num_members]: me.check_vote(vote, peer)) for n, vote in enumerate(votes))
    )
    identity_module._check_signature_cached.cache_clear()
    lock_s = cpu_s(lambda: me.check_lock(lock, signed, peers))
    report = Report(
        "CPU seconds and kB of signatures for a member in a step; locks are checked after failed attempts only"
    )
    report.row(
        f"{num_members} members",
        sign=sign_s,
        reports=reports_s,
        votes=votes_s,
        lock=lock_s,
        group_kb=len(signed.data) / 1000,
        votes_kb=2 * num_members * len(votes[0].to_bytes()) / 1000,
        certificate_kb=len(certificate) / 1000,
    )
    report.show()
    assert sign_s + reports_s + votes_s + lock_s < MOST_CPU_S[num_members]


def signed_group(signers: list[RunSignatures]) -> SignedGroup:
    peers = [each.identity.peer_id for each in signers]
    members = tuple(Contribution(peer_id=peer, num_tokens=8, num_samples=2, bytes_per_s=10**7) for peer in peers)
    group = Group(
        run="run",
        step=3,
        attempt=0,
        state_digest=bytes(32),
        members=members,
        part_values=(1000,) * len(peers),
        reduce_s=10.0,
        vote_s=10.0,
    )
    own = tuple(each.sign_group(group, NOW).group.members[place] for place, each in enumerate(signers))
    return signers[0].sign_group(replace(group, members=own), NOW)
