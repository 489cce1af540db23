"""The plan for the next pass: it is bounded, never empty while work waits, and fair between networks and their peers.

A client is named by a letter, or by its network and a number, as in `lan.1`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from swarm.serving.engine.scheduler import QUANTUM_TOKENS, BatchPlan, SchedulableStep, Scheduler
from swarm.serving.peer_shares import Sharer
from swarm.serving.server.deployment import ServerOptions

BUDGET = 100
ALL = (0, 4)


@dataclass
class Machine:
    """Runs plans.

    `served` counts prompt tokens by client; `waits` lists the steps since a work came or had its turn.
    """

    max_batch: int = 4
    budget: int = BUDGET
    served: Counter[str] = field(default_factory=Counter)
    waits: dict[SchedulableStep, int] = field(default_factory=dict)
    longest_wait: int = 0

    def __post_init__(self) -> None:
        self.scheduler: Scheduler[SchedulableStep] = Scheduler(max_batch=self.max_batch)

    def add(self, client: str, num_tokens: int = 1, blocks: tuple[int, int] = ALL) -> SchedulableStep:
        sharer = Sharer(client.partition(".")[0], client)
        work = SchedulableStep(sharer=sharer, blocks=blocks, num_tokens=num_tokens)
        self.scheduler.add(work)
        self.waits[work] = 0
        return work

    def step(self) -> BatchPlan[SchedulableStep]:
        plan = self.scheduler.plan(self.budget)
        for work in self.waits:
            self.waits[work] += 1
            self.longest_wait = max(self.longest_wait, self.waits[work])
        for index, (work, num_tokens) in enumerate(plan.parts):
            assert 1 <= num_tokens <= work.num_tokens
            self.waits[work] = 0
            if index >= plan.num_decodes:
                self.served[work.sharer.peer_id] += num_tokens
            work.num_tokens -= num_tokens
            if not work.num_tokens:
                self.scheduler.remove(work)
                del self.waits[work]
        return plan


def test_plan_nothing_ready_is_empty() -> None:
    assert Machine().step().parts == ()


def test_plan_takes_every_decode_and_fills_the_rest_with_a_prompt() -> None:
    machine = Machine()
    decodes = [machine.add(client) for client in "abc"]
    prompt = machine.add("d", 500)
    plan = machine.step()
    assert plan.parts == (*((work, 1) for work in decodes), (prompt, BUDGET))
    assert (plan.num_decodes, plan.num_prefill_tokens, len(plan.parts)) == (3, BUDGET, 4)


def test_plan_takes_a_decode_at_once_when_prompts_wait() -> None:
    """A decode that arrives between two steps is in the next one, whatever the queue holds."""
    machine = Machine()
    for client in "abcdefgh":
        machine.add(client, 10_000)
    for _ in range(50):
        decode = machine.add("z")
        assert (decode, 1) in machine.step().parts


def test_plan_takes_decodes_in_the_order_in_which_they_came_when_they_do_not_fit() -> None:
    machine = Machine(max_batch=2)
    for _ in range(60):
        for _ in range(12 - len(machine.waits)):
            machine.add("a")
        machine.step()
    assert machine.longest_wait == 6
    assert ServerOptions().max_sessions <= ServerOptions().max_batch, "the decodes of all of a server's clients fit"


KEYS = [f"sybils.{number}" for number in range(40)]


def test_plan_gives_keys_of_one_network_together_the_prompt_tokens_of_one_other_client() -> None:
    machine = Machine()
    for client in (*KEYS, "visitor", "lan.1", "lan.2"):
        machine.add(client, 5_000)
    for _ in range(90):
        machine.step()
    assert max(machine.served.values()) == machine.served["visitor"] >= 30 * BUDGET - QUANTUM_TOKENS
    assert abs(machine.served["visitor"] - sum(machine.served[key] for key in KEYS)) <= QUANTUM_TOKENS
    assert abs(machine.served["lan.1"] - machine.served["lan.2"]) <= QUANTUM_TOKENS


def test_plan_runs_a_decode_in_every_other_pass_when_keys_of_another_network_use_many_ranges() -> None:
    machine = Machine()
    for number, key in enumerate(KEYS):
        machine.add(key, 10_000, (0, 1 + number))
    for _ in range(10):
        decode = machine.add("visitor", 1, (1, 3))
        machine.step()
        machine.step()
        assert decode.num_tokens == 0


def test_plan_gives_a_client_no_more_when_its_prompts_are_in_many_sequences() -> None:
    machine = Machine()
    for _ in range(10):
        machine.add("greedy", 5_000)
    machine.add("modest", 5_000)
    for _ in range(60):
        machine.step()
    assert abs(machine.served["greedy"] - machine.served["modest"]) <= QUANTUM_TOKENS


def test_plan_does_not_hold_up_a_short_prompt_when_a_long_one_runs() -> None:
    machine = Machine()
    machine.add("document", 100_000)
    machine.step()
    question = machine.add("question", 60)
    for _ in range(4):
        machine.step()
    assert question.num_tokens == 0


def test_plan_lets_prompts_of_one_client_take_turns() -> None:
    machine = Machine()
    machine.add("gateway", 100_000)
    machine.step()
    question = machine.add("gateway", 60)
    for _ in range(4):
        machine.step()
    assert question.num_tokens == 0


def test_plan_runs_one_range_a_step_and_lets_ranges_take_turns() -> None:
    machine = Machine()
    first, second = machine.add("a", 1_000, (0, 2)), machine.add("b", 1_000, (2, 4))
    for _ in range(6):
        assert len({work.blocks for work, _ in machine.step().parts}) == 1
    assert first.num_tokens == second.num_tokens == 1_000 - 3 * BUDGET


def test_plan_gives_a_client_no_more_when_it_uses_many_ranges() -> None:
    machine = Machine()
    for end in range(1, 30):
        machine.add("a", 10_000, (0, end))
    machine.add("b", 10_000, (0, 30))
    for _ in range(40):
        machine.step()
    assert machine.served["b"] == machine.served["a"] == 20 * BUDGET


def test_remove_keeps_cancelled_work_out_of_later_plans() -> None:
    machine = Machine()
    work = machine.add("a", 5)
    machine.scheduler.remove(work)
    machine.scheduler.remove(work)
    assert len(machine.scheduler) == 0
    assert machine.scheduler.plan(BUDGET).parts == ()


ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 3),  # steps before it
        st.sampled_from("abcd"),
        st.one_of(st.just(1), st.integers(1, 700)),
        st.sampled_from([ALL, ALL, (1, 3)]),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=50)
@given(ARRIVALS, st.integers(1, 5), st.sampled_from([1, 16, 100, 1000]))
def test_plan_keeps_its_bounds_and_finishes_all_work_with_any_arrivals(
    arrivals: list[tuple[int, str, int, tuple[int, int]]], max_batch: int, budget: int
) -> None:
    machine = Machine(max_batch=max_batch, budget=budget)
    num_tokens = 0

    def step() -> None:
        nonlocal num_tokens
        had = len(machine.scheduler)
        plan = machine.step()
        works = [work for work, _ in plan.parts]
        # the plan is work-conserving and bounded, has one range, and has each work once
        assert bool(works) == bool(had)
        assert len({work.blocks for work in works}) <= 1
        assert len(set(works)) == len(works)
        assert plan.num_decodes <= max_batch
        assert plan.num_prefill_tokens <= budget
        num_tokens -= plan.num_decodes + plan.num_prefill_tokens

    for pause, client, wanted, blocks in arrivals:
        for _ in range(pause):
            step()
        machine.add(client, wanted, blocks)
        num_tokens += wanted
    # there are two ranges, and a step runs one; all remaining work fits into this many steps
    bound = 2 * (num_tokens // min(budget, max_batch) + len(arrivals)) + 2
    for _ in range(bound):
        step()
    assert num_tokens == len(machine.scheduler) == 0


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 3000)), min_size=1, max_size=30))
def test_plan_backlogged_clients_get_equal_shares(prompts: list[tuple[str, int]]) -> None:
    """Neither of two clients with waiting prompts is more than a turn and a step ahead of the other."""
    machine = Machine()
    left: Counter[str] = Counter()
    for client, num_tokens in prompts:
        machine.add(client, num_tokens + 1)
        left[client] += num_tokens + 1
    for _ in range(200):
        machine.step()
        busy = [client for client in left if any(w.sharer.peer_id == client and not w.is_decode for w in machine.waits)]
        shares = [machine.served[client] for client in busy]
        if not busy:
            break
        assert max(shares) - min(shares) <= QUANTUM_TOKENS + BUDGET


@pytest.mark.parametrize("num_sequences", [1, 7])
def test_plan_starves_no_sequence_when_one_decodes_without_pause(num_sequences: int) -> None:
    machine = Machine(max_batch=1)
    other = machine.add("b", 300)
    for _ in range(3 * (num_sequences + 1)):
        while len(machine.waits) < num_sequences + bool(other.num_tokens):
            machine.add("a")
        machine.step()
    assert other.num_tokens == 0
