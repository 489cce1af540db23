"""What a run's author should know before signing it: settings that are possible and cannot lose a member. Pure."""

from __future__ import annotations

from swarm.training.run.run_config import DEFAULT_AGGREGATOR, RunConfig


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
