"""What a run asks of its members, by arithmetic: before anyone joins, and without building anything."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_compression import get_codec

from swarm.training.run.run_config import DEFAULT_AGGREGATOR, RunConfig
from swarm.training.run.run_model import check_model

PROGRAM_BYTES = 600 * 2**20
"""A trainer before it has a model: Python, torch, transformers, numba and libp2p, as measured on Linux."""
PARAMETER_BYTES = 44
"""The most that a member on one CPU device holds for each parameter, beside activations: weights 4, moments 8,
committed state 8, last results 4, and then either a round (pseudo-gradient 4, proposed state 8, reduction 2) or the
next interval while a checkpoint is written (gradient 4, copies of the moments 8, the former state, as long as it is
still being written, 8)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """`num_parameters` of the model. For one outer step: `member_tokens` that a member trains on in a full interval,
    `group_tokens` for the smallest and the largest group, and `member_bytes` that a member sends.

    The bytes are those of a large group, in which a member sends nearly all of its vector to the parts' owners, and as
    much in results: in a group of n it is 1 - 1/n of that. Small messages and backups of parts come on top.
    `memory_bytes` is what a member on one CPU device needs, activations left out.
    """

    num_parameters: int
    member_tokens: int
    group_tokens: tuple[int, int]
    member_bytes: int
    memory_bytes: int


def cost_of(config: RunConfig) -> Cost:
    """Raises ConfigError if the model cannot be trained."""
    num_parameters = check_model(config)
    member_tokens = config.samples_per_interval * config.data.window_tokens
    largest_fragment = -(-num_parameters // config.fragments)
    return Cost(
        num_parameters=num_parameters,
        member_tokens=member_tokens,
        group_tokens=(config.min_group * member_tokens, config.max_group * member_tokens),
        member_bytes=2 * get_codec(config.codec).encoded_bytes(largest_fragment),
        memory_bytes=PROGRAM_BYTES + PARAMETER_BYTES * num_parameters,
    )


def warnings_of(config: RunConfig) -> list[tuple[str, str]]:
    """Each with what to do about it."""
    if config.min_group == 1:
        return []
    found, needs = list[tuple[str, str]](), f"a round needs {config.min_group} members (min_group)"
    fewest = config.make_aggregator().fewest_members()
    if len(config.admission) == config.min_group:
        found.append((f"{needs}, and the run admits no more: it stops when one is lost", "admit more, or need fewer"))
    elif config.max_group == config.min_group:
        found.append((f"{needs}, and takes no more: it waits for another one when one is lost", "raise max_group"))
    if not config.fallback and fewest > 1:
        message = f"{config.aggregator} needs {fewest} contributions: with one fewer a round takes no step"
        found.append((message, f'set fallback = "{DEFAULT_AGGREGATOR}"'))
    return found
