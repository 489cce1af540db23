"""Computes what a run's author should know before signing: what it asks of its members, and which of its settings are
risky.

The cost is arithmetic: nothing is built. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm_compression import get_codec

from swarm.training.run.run_config import DEFAULT_AGGREGATOR, DEFAULT_MIXING, RunConfig
from swarm.training.run.run_model import check_model, transformers_config
from swarm.trust.aggregators import Mean
from swarm.trust.mixing import NO_MIXING

PROGRAM_BYTES = 500 * 2**20
"""The memory of a trainer without a model, as measured on Linux: Python with torch, transformers and numba (430 MiB, of
which 45 are code in the system's file cache), and the libp2p daemon (70 MiB)."""
PARAMETER_BYTES = 34
"""The most that a member on one CPU device holds for each parameter, beside activations, when the next state is made:
weights 4, moments 8, the committed state 8, the next one 8, the last four rounds' results in int8 4, and 2 of
contributions whose held-out scores are yet to be measured. An interval takes 4 of gradient, a round 4 of
pseudo-gradient, 1 of its own result and 1 of the members' slices, instead of the next state. A run with overlap does
both at once; what a peer fetches, and what waits for a slow disk, adds a state of 8 each."""

ACTIVATION_VALUES, LOGIT_VALUES = 24, 3
"""The least that a step keeps in fp32, as measured: values for each number that a layer passes on, of which activation
checkpointing keeps one, and for each logit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Holds what one outer step of a run costs.

    A member trains on `member_tokens` in a full interval, and the smallest and the largest round on `group_tokens`,
    with the followers of its members. A member sends `member_bytes` in a large group, in which nearly all of its vector
    goes to the parts' owners, and as much in results; in a group of n it is 1 - 1/n of that. The head of a full cluster
    also receives a vector of each follower, and may send each the result: `head_bytes` each way. Small messages and
    backups of parts come on top. `memory_bytes` is the memory of a member on one CPU device, without activations.
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
    """Return about how many bytes the activations of `num_windows` windows take. Sizes that the model's family calls
    otherwise count as none. Raises ConfigError."""
    model = transformers_config(config.model)
    vocab, layers, hidden = (getattr(model, name, 0) for name in ("vocab_size", "num_hidden_layers", "hidden_size"))
    values = LOGIT_VALUES * vocab + (1 if checkpointing else ACTIVATION_VALUES) * layers * hidden
    return 4 * num_windows * config.data.window_tokens * values


def warnings_of(config: RunConfig) -> list[tuple[str, str]]:
    """Return what an author may not expect: settings with which the run stops when a member is lost, or a member that
    lies does what it likes, and what validation does not cover. Each has its remedy."""
    if config.min_group == 1:
        return _of_validation(config)
    found, needs = _of_validation(config), f"a round needs {config.min_group} members (min_group)"
    fewest = config.make_aggregator().fewest_members()
    if len(config.admission) == config.min_group:
        found.append((f"{needs}, and the run admits no more: it stops when one is lost", "admit more, or need fewer"))
    elif config.max_group == config.min_group:
        found.append((f"{needs}, and takes no more: it waits for another one when one is lost", "raise max_group"))
    if not config.majority_after_s:
        message = "majority_after_s is 0: the run stops for good when more than a third of its members are lost at once"
        found.append((message, "set the seconds after which a majority is enough, such as 60"))
    if not config.fallback and fewest > 1:
        message = f"{config.aggregator} needs {fewest} contributions: with one fewer a round takes no step"
        found.append((message, f'set fallback = "{DEFAULT_AGGREGATOR}"'))
    return found + _unprotected(config)


def _unprotected(config: RunConfig) -> list[tuple[str, str]]:
    """Return the settings with which aggregation protects nothing, or less than its author may believe."""
    found, robust = list[tuple[str, str]](), f'set aggregator = "{DEFAULT_AGGREGATOR}", unless you trust all members'
    if config.aggregator == Mean.name:
        found.append(("the mean believes everybody: one member that lies can ruin the run", robust))
    elif config.fallback == Mean.name:
        message = "the fallback is the mean: in a small round one member that lies can ruin the run"
        found.append((message, f'set fallback = "{DEFAULT_AGGREGATOR}"'))
    elif config.pre_aggregation == NO_MIXING:
        message = "nothing is mixed before the aggregator: liars together do more, above all where members' data differ"
        found.append((message, f'set pre_aggregation = "{DEFAULT_MIXING}"'))
    return found


def _of_validation(config: RunConfig) -> list[tuple[str, str]]:
    if not config.validation_rate:
        return []
    found = list[tuple[str, str]]()
    if config.cluster_size > 1:
        message = "members that bring the work of followers are not validated: it is the sum of several intervals"
        found.append((message, "set cluster_size = 1, if all members of the run are to be validated"))
    if not config.data.digest and not config.data.revision:
        message = "the data is not pinned: a member with other data would be banned for what it trains on"
        found.append((message, "sign the run with its data: swarm-node run sign --pin"))
    return found
