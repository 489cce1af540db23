"""Computes what an author should know before signing a run: its cost for members, and which settings are risky.

Costs are estimated from the settings; the model is built only on the meta device. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm_compression import get_codec

from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_model import check_model, transformers_config
from swarm.trust.mixing import DEFAULT_MIXING, NO_MIXING
from swarm.trust.standard_aggregators import DEFAULT_AGGREGATOR, Mean

PROGRAM_BYTES = 500 * 2**20
"""The memory of a trainer without a model, as measured on Linux: Python with torch, transformers and numba (430 MiB, of
which 45 are code in the system's file cache), and the libp2p daemon (70 MiB)."""
PARAMETER_BYTES = 34
"""Maximum memory per parameter of a member on one CPU device, without activations, while it makes the next state:
weights 4, moments 8, the committed state 8, the next one 8, the last four rounds' results in int8 4, and 2 of
contributions whose held-out scores are yet to be measured. Instead of the next state, an interval holds 4 of gradient,
and a round 4 of pseudo-gradient, 1 of its own result and 1 of the members' slices. A run with overlap does both at
once. A former state that a peer is fetching adds 8, and so does one that waits for a slow disk."""

ACTIVATION_VALUES, LOGIT_VALUES = 24, 3
"""Fewest fp32 values that a step keeps, as measured: for each value of a layer's output (1 with activation
checkpointing), and for each logit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of one outer step of a run.

    A member trains on `member_tokens` in a full interval. `group_tokens` are the tokens of the smallest round, and of
    the largest with all followers. In a large group a member sends `member_bytes`: its vector to the parts' owners, and
    as much in results; in a group of n it sends 1 - 1/n of that. The head of a full cluster also receives a vector from
    each follower, and may send each the result: `head_bytes` each way. Small messages and backups of parts are not
    counted. `memory_bytes` is the memory of a member on one CPU device, without activations.
    """

    num_parameters: int
    member_tokens: int
    group_tokens: tuple[int, int]
    member_bytes: int
    head_bytes: int
    memory_bytes: int


def cost_of(config: RunConfig) -> Cost:
    """Raises ConfigError if the model cannot be trained."""
    num_parameters = check_model(config)
    member_tokens = config.samples_per_interval * config.data.window_tokens
    vector_bytes = get_codec(config.codec).encoded_bytes(-(-num_parameters // config.fragments))
    return Cost(
        num_parameters=num_parameters,
        member_tokens=member_tokens,
        group_tokens=(config.min_group * member_tokens, config.max_trainers * member_tokens),
        member_bytes=2 * vector_bytes,
        head_bytes=(1 + config.cluster_size) * vector_bytes,
        memory_bytes=PROGRAM_BYTES + PARAMETER_BYTES * num_parameters,
    )


def activation_bytes(config: RunConfig, num_windows: int, *, checkpointing: bool) -> int:
    """Return roughly how many bytes the activations of `num_windows` windows take. A size for which the model family
    has another name counts as 0. Raises ConfigError."""
    model = transformers_config(config.model)
    vocab, layers, hidden = (getattr(model, name, 0) for name in ("vocab_size", "num_hidden_layers", "hidden_size"))
    values = LOGIT_VALUES * vocab + (1 if checkpointing else ACTIVATION_VALUES) * layers * hidden
    return 4 * num_windows * config.data.window_tokens * values


def warnings_of(config: RunConfig) -> list[tuple[str, str]]:
    """Return warnings with their remedies: settings with which the loss of a member stops the run, or a lying member
    can ruin it, and what validation does not cover."""
    if config.min_group == 1:
        return _of_validation(config)
    found, needs = _of_validation(config), f"a round needs {config.min_group} members (min_group)"
    fewest = config.make_aggregator().fewest_members()
    if len(config.admission) == config.min_group:
        found.append(
            (f"{needs}, and admission lists no more: the run stops when one is lost", "admit more, or lower min_group")
        )
    elif config.max_group == config.min_group:
        found.append(
            (f"{needs}, and max_group allows no more: if one is lost, the round waits for another", "raise max_group")
        )
    if not config.majority_after_s:
        message = "majority_after_s is 0: the run stops for good when more than a third of its members are lost at once"
        found.append((message, "set the seconds after which a majority is enough, such as 60"))
    if not config.fallback and fewest > 1:
        message = f"{config.aggregator} needs {fewest} contributions: with fewer, a round takes no step"
        found.append((message, f'set fallback = "{DEFAULT_AGGREGATOR}"'))
    return found + _unprotected(config)


def _unprotected(config: RunConfig) -> list[tuple[str, str]]:
    """Return warnings about settings with which aggregation protects little or nothing."""
    found, robust = list[tuple[str, str]](), f'set aggregator = "{DEFAULT_AGGREGATOR}", unless you trust all members'
    if config.aggregator == Mean.name:
        found.append(("the aggregator mean gives no protection: one lying member can ruin the run", robust))
    elif config.fallback == Mean.name:
        message = "the fallback is the mean: in a small round one lying member can ruin the run"
        found.append((message, f'set fallback = "{DEFAULT_AGGREGATOR}"'))
    elif config.pre_aggregation == NO_MIXING:
        message = "contributions are not mixed: colluding liars do more harm, above all if members' data differ"
        found.append((message, f'set pre_aggregation = "{DEFAULT_MIXING}"'))
    return found


def _of_validation(config: RunConfig) -> list[tuple[str, str]]:
    if not config.validation_rate:
        return []
    found = list[tuple[str, str]]()
    if config.cluster_size > 1:
        message = "members that bring the work of followers are not validated: that work combines intervals"
        found.append((message, "set cluster_size = 1, if all members of the run are to be validated"))
    if not config.data.digest and not config.data.revision:
        message = "the data is not pinned: a member that trains on other data would be banned"
        found.append((message, "sign the run with its data: swarm-node run sign --pin"))
    return found
