"""Checks a random share of a client's answers, in the background, after they have ended.

The client draws after the answer, with the operating system's randomness, so no server can know which answers are
checked. All spans of a drawn answer are checked, one after another, one answer at a time. While MAX_WAITING answers or
MAX_WAITING_BYTES of rows wait, further drawn answers are skipped, so that checks never delay a request. One task does
the checks, from the first drawn answer until `close`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from numbers import Real

from swarm_protocol.errors import ConfigError, SwarmError
from swarm_protocol.manifest_messages import manifest_dtype
from swarm_protocol.records import ServeRecord

from swarm.ended_tasks import end_tasks
from swarm.network.interface import Network
from swarm.network.membership import Membership
from swarm.router.revisions import manifest_of
from swarm.serving.checking.comparison import TOLERANCES
from swarm.serving.checking.finished_answer import AnsweredSpan, AnswerToCheck, CheckReport, FinishedAnswer, Result
from swarm.serving.checking.span_check import CheckContext, check_span, recompute
from swarm.serving.sampling.sampling import check_kind
from swarm.trust.reputation import Reputation

logger = logging.getLogger(__name__)

DEFAULT_SHARE = 0.01
"""Within 300 answers, 95 % of servers that lie in each answer are found, for less than one percent of the answers'
cost."""

MAX_WAITING = 8

MAX_WAITING_BYTES = 256 * 2**20
"""Maximum bytes of rows that wait, as much as the store of prefixes."""

MAX_REPORTS = 256

CHECK_S = 300.0
"""Time limit for one span: two servers compute, and each may serve others first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotCheckOptions:
    """`share` of the answers are checked; 0: none. Raises ConfigError.

    `reputation` is from earlier runs. `on_report` is called with the report of each span. `draw` returns a random
    number in [0, 1).
    """

    share: float = DEFAULT_SHARE
    reputation: Reputation | None = None
    on_report: Callable[[CheckReport], None] = field(default=lambda _report: None)
    draw: Callable[[], float] = field(default=random.SystemRandom().random)

    def __post_init__(self) -> None:
        check_kind(self.share, "the share of spot checks", Real)
        if not 0 <= self.share <= 1:
            raise ConfigError(f"spot checks of {self.share} of the answers", remedy="use a share of 0 to 1, as 0.01")


class SpotChecks:
    """One client's checks. `num_results` counts spans by result."""

    def __init__(
        self,
        network: Network,
        membership: Membership,
        reputation: Reputation,
        options: SpotCheckOptions,
        *,
        convicted: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        self.reputation = reputation
        self.num_results: Counter[Result] = Counter()
        self.reports: deque[CheckReport] = deque(maxlen=MAX_REPORTS)
        self._network = network
        self._membership = membership
        self._options = options
        self._convicted = convicted
        self._waiting = asyncio.Queue[tuple[AnswerToCheck, int]](MAX_WAITING)
        self._num_bytes = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def is_on(self) -> bool:
        """True if servers must sign commitments for each answer."""
        return self._options.share > 0

    def draws(self) -> bool:
        """Draw whether to check an answer that has just ended."""
        return self.is_on and self._options.draw() < self._options.share

    def submit(self, answer: AnswerToCheck) -> bool:
        """Queue the answer for a check and return True, or return False if too much waits."""
        if self._waiting.full() or self._num_bytes + answer.num_bytes > MAX_WAITING_BYTES:
            return False
        self._waiting.put_nowait((answer, answer.num_bytes))
        self._num_bytes += answer.num_bytes
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="spot checks")
        return True

    async def settled(self) -> None:
        """Wait until no answer is queued or being checked."""
        await self._waiting.join()

    async def close(self) -> None:
        """Drop queued answers, and cancel the running check."""
        if self._task is not None:
            await end_tasks(self._task)

    async def _run(self) -> None:
        while True:
            closed, num_bytes = await self._waiting.get()
            try:
                answer = await closed.finished()
                for span in answer.spans:
                    self._note(await self._check(answer, span), answer)
            except Exception:  # a defect here or in a listener, which must not end all checks
                logger.exception("the spot checks of an answer failed")
            self._num_bytes -= num_bytes
            self._waiting.task_done()

    async def _check(self, answer: FinishedAnswer, span: AnsweredSpan) -> CheckReport:
        try:
            servers = await self._membership.servers(answer.model.name)
        except SwarmError as error:
            logger.info("looking up servers for a spot check: %s", error)
            servers = {}
        able = self._able(answer, span, servers)
        context = CheckContext(
            network_id=self._network.network_id,
            now=self._network.now(),
            dtype=dtype_of(span.dtype, answer.model.revision, able.values()),
            candidates=tuple(able),
            recompute=partial(recompute, self._network, answer.model),
        )
        try:
            async with asyncio.timeout(CHECK_S):
                return await check_span(answer, span, context)
        except Exception as error:  # a defect here, which must not end all checks
            if not isinstance(error, TimeoutError):
                logger.exception("a spot check failed")
            return CheckReport.unchecked(span, "busy")

    def _able(
        self, answer: FinishedAnswer, span: AnsweredSpan, servers: Mapping[str, ServeRecord]
    ) -> dict[str, ServeRecord]:
        """Return the other servers of all blocks of the span in the same revision, in random order, without barred and
        convicted ones."""
        now = time.time()
        found = [
            (peer_id, record)
            for peer_id, record in servers.items()
            if record.revision == answer.model.revision
            and record.state == "serving"
            and record.start <= span.start
            and span.end <= record.end
            and peer_id != span.peer_id
            and record.dtype
        ]
        barred = self.reputation.for_routing([peer_id for peer_id, _ in found], now, "").barred | self._convicted()
        random.SystemRandom().shuffle(found)
        return {peer_id: record for peer_id, record in found if peer_id not in barred}

    def _note(self, report: CheckReport, answer: FinishedAnswer) -> None:
        self.num_results[report.result] += 1
        self.reports.append(report)
        now = time.time()
        for peer_id, outcome in report.outcomes:
            self.reputation.note(peer_id, outcome, now)
        log = logger.warning if report.named else logger.info
        log(
            "spot check of blocks %d:%d of %s on %s: %s%s",
            report.start,
            report.end,
            answer.model.name,
            report.peer_id,
            report.result,
            f" ({report.detail})" if report.detail else "",
        )
        answer.on_report(report)
        self._options.on_report(report)


def dtype_of(own: str, revision: str, others: Collection[ServeRecord]) -> str:
    """Return the dtype in which a server computes, which determines the tolerance; "" if it is not known.

    The revision of a published model proves the dtype. Otherwise it comes from the server's record (`own`) and the
    records of the `others` that can check it. The dtype with the largest tolerance counts, so that no lie makes an
    honest server fail.
    """
    if manifest := next(filter(None, map(manifest_of, others)), b""):
        return manifest_dtype(manifest, revision)
    said = {record.dtype for record in others} | {own}
    return max(said, key=lambda dtype: TOLERANCES[dtype].row) if said <= TOLERANCES.keys() else ""
