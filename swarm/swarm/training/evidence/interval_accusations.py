"""The accusations of intervals of which this member has heard, with the findings that were gathered for each.

One member's finding convicts nobody: findings of several members add up, until they are enough (`wrong_interval`).
`Convictions` owns it and calls it for one piece of evidence at a time; checks are in the executor.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import TypeAlias

from swarm_protocol.envelope import issued_at
from swarm_protocol.errors import PeerViolation
from swarm_protocol.proof_messages import Evidence, WrongInterval
from swarm_protocol.training_messages import Outcome

from swarm.newest_items import NewestItems
from swarm.training.evidence.wrong_interval import IntervalCase, read_case
from swarm.training.state.run_context import RunContext

AccusationKey: TypeAlias = tuple[str, int, Outcome]
"""A member, the step, and the outcome that draws its interval: a made-up outcome is in nobody's way."""

MAX_ACCUSATIONS = 16
"""Accusations of intervals whose findings are gathered: each step draws few."""


class IntervalAccusations:
    """The newest accusations in the run of `context`."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._cases = NewestItems[AccusationKey, IntervalCase](MAX_ACCUSATIONS)
        self._key_of = NewestItems[bytes, AccusationKey](MAX_ACCUSATIONS)  # what was checked, by its digest

    def has_new_finder(self, peer: str, step: int, evidence: Evidence) -> bool:
        """Return whether evidence of an interval that is known to be wrong names a member that has not been known to
        find it wrong. Raises PeerViolation or IntegrityError."""
        known = {name for key, case in self._cases.items() if key[:2] == (peer, step) for name in case.finders}
        findings = WrongInterval.from_bytes(evidence.body).findings
        read = self._context.signatures.read_finding
        return bool(known) and any(read(each, issued_at(each))[0] not in known for each in findings)

    async def gather(self, evidence: Evidence, *, was_kept: bool) -> tuple[IntervalCase, bool] | None:
        """Return the accusation with all findings that came so far, and whether this evidence has added some to what
        was known; None if this member cannot tell whether it is of the run. Raises PeerViolation or IntegrityError."""
        case = await self._read_case(evidence)
        if not was_kept and not self._is_of_this_run(case):
            return None
        key = (case.member.peer_id, case.step, case.proof.outcome)
        known = self._cases.get(key)
        if known is not None and known is not case:
            case = known.with_findings_of(case)
        self._cases[key] = case
        return case, known is not None and len(case.finders) > len(known.finders)

    def _is_of_this_run(self, case: IntervalCase) -> bool:
        """Return whether the step of an accusation is one that the run has taken, not one that its makers made up; see
        `wrong_interval`. Raises PeerViolation if this member knows that it is not."""
        links = self._context.replica.history.since(case.step)
        outcomes = {link.outcome for link in links if link.outer_step == case.step and not link.is_order}
        if not outcomes:
            return case.is_voted
        if case.proof.outcome not in outcomes:
            raise PeerViolation("evidence has another outcome of the step than this member's history")
        return True

    async def _read_case(self, evidence: Evidence) -> IntervalCase:
        """Return the accusation in `evidence`, with the findings that came before. Its finder sends it to all members,
        and each of these passes it on: it is checked once. Raises PeerViolation or IntegrityError."""
        digest, context = hashlib.sha256(evidence.body).digest(), self._context
        if (known := self._key_of.get(digest)) is not None and known in self._cases:
            return self._cases[known]
        loop = asyncio.get_running_loop()
        case = await loop.run_in_executor(
            context.executor, read_case, evidence.body, context.signatures, context.replica.config
        )
        self._key_of[digest] = (case.member.peer_id, case.step, case.proof.outcome)
        return case
