"""Members of a simulated run that reduce their part wrongly, and sign what they made."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any

from support.training_swarm import AlteredMember
from swarm.training.allreduce.parts import ReductionScheme
from swarm.training.member.round_driver import RoundDriver
from swarm.training.member.run_member import RunMember
from swarm.training.state.run_context import RunContext
from swarm.trust.aggregator import AggregationDecision, Aggregator, Survey
from swarm.trust.kernels import Doubles
from swarm_protocol.training_messages import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Dishonest(Aggregator):
    """Decides as `honest` does, and then changes the decision."""

    honest: Any
    change: Callable[[AggregationDecision], AggregationDecision]

    def __post_init__(self) -> None:
        pass

    @property
    def survey(self) -> Survey:  # type: ignore[override]
        return self.honest.survey  # type: ignore[no-any-return]

    def decide(self, weight_LM: Any, survey: Doubles, /) -> AggregationDecision:
        return self.change(self.honest.decide(weight_LM, survey))


def times_minus_ten(decision: AggregationDecision) -> AggregationDecision:
    return replace(decision, coefficients_LM=-10 * decision.coefficients_LM, centre_L=-10 * decision.centre_L)


def without_the_first(decision: AggregationDecision) -> AggregationDecision:
    coefficients_LM = decision.coefficients_LM.copy()
    coefficients_LM[:, 0] = 0.0
    return replace(decision, coefficients_LM=coefficients_LM)


def owner_that(
    change: Callable[[AggregationDecision], AggregationDecision], steps: Container[int] = range(1 << 30)
) -> type[RunMember]:
    """Return a member that changes what it makes of its part, in these outer steps. As an auditor it then finds all
    others wrong."""

    class Liar(AlteredMember):
        async def _drive(self, driver: RoundDriver, context: RunContext) -> bytes:
            scheme = driver.reductions._scheme

            def dishonest(group: Group) -> ReductionScheme:
                honest = scheme(group)
                if group.step not in steps:
                    return honest
                return replace(honest, aggregator=Dishonest(honest=honest.aggregator, change=change))

            driver.reductions._scheme = dishonest  # type: ignore[method-assign]
            return await super()._drive(driver, context)

    return Liar
