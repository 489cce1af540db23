"""Audits one reduction: before a member votes, it checks the parts that other members made.

An auditor first asks a part's owner for its PartStatement: the owner's signature of the result that the auditor already
holds. Only then does the auditor name the leaves that it wants to see, drawn with its own random numbers, which nobody
can know or influence. The owner shows all contributors' slices of these leaves. The slices are in hash trees whose
roots the contributors signed before the group was formed, and the aggregation of a leaf is exact. So the auditor
computes the leaf's result and compares bytes. If the bytes differ, group, statement and slices are evidence that anyone
can check (`CaughtLying`). A slice among them that nobody can decode convicts its sender as well.

The idea comes from BTARD (Gorbunov et al. 2021, arXiv 2106.11257), where inner products in a random direction check all
members' sums. Here leaves are drawn instead, since that is exact and works for every aggregator. A lie about a share p
of a part's leaves survives k even draws with probability (1 - p)^k; leaves with large results are drawn more often.

If an owner is gone, its backup answers for the part. It also answers in place of an owner that has signed its result
but does not show the drawn leaves: the slices that the backup shows are under the same roots, and convict the owner if
it signed another result. If neither answers, the part is not audited. This member then votes for the outcome only once
so many others have voted for it that one of them must be honest (`is_audited`); otherwise the attempt fails.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeAlias

from swarm_compression.codec import Data
from swarm_protocol import limits
from swarm_protocol.envelope import OutOfTime
from swarm_protocol.errors import PeerError, PeerTimeout, PeerViolation, RoundError, SwarmError
from swarm_protocol.hash_tree import HashTree
from swarm_protocol.proof_messages import WrongReduction
from swarm_protocol.reduction_messages import AuditDraw, AuditedSlice, PartStatement
from torch import Tensor

from swarm.network.interface import EndOfStream, Stream
from swarm.training.allreduce.butterfly import Butterfly
from swarm.training.allreduce.committed_slices import MadePart, are_committed, undecodable
from swarm.training.allreduce.leaf_checks import audit_plan, draw_audited_leaves, hashed_part, part_leaf, reduced_leaves
from swarm.training.allreduce.part_streams import PartStreams, blamed
from swarm.training.allreduce.parts import CaughtLying, backup_peer, decoded_frames, part_leaves

_Slices: TypeAlias = dict[int, tuple[AuditedSlice, ...]]
"""The contributors' slices, by the index of the leaf within its part."""


class NotAudited(PeerError):
    """Neither the owner of a part nor its backup shows how it was made."""


class Auditing:
    """One member's reduction over its `streams`, with its side of the audits: it answers others, and audits them.

    `on_failure` is that of `Butterfly`. `chance` draws what this member audits. `sign` signs its statements. `read`
    returns the signer and the content of a signed statement; it raises PeerViolation or IntegrityError.
    """

    def __init__(
        self,
        streams: PartStreams,
        on_failure: Callable[[SwarmError], Awaitable[None]],
        chance: random.Random,
        *,
        sign: Callable[[PartStatement], bytes],
        read: Callable[[bytes], tuple[str, PartStatement]],
    ) -> None:
        self.butterfly = Butterfly(streams, on_failure, self.answer)
        self._streams = streams
        self._signed = streams.signed
        self._group = streams.group
        self._chance = chance
        self._sign = sign
        self._read = read
        self._answers: dict[int, tuple[MadePart, bytes]] = {}
        self._answering = defaultdict[int, asyncio.Lock](asyncio.Lock)
        self._limit_s = 0.0  # for one maker of a part, so that time is left for the other one

    async def sign_own_part(self) -> None:
        """Sign the statement for this member's own part. Raises PeerViolation, which names a member whose slices are
        not those that it committed to."""
        me = self._group.peer_ids.index(self._streams.me)
        if self._group.part_values[me]:
            await self._answer_for(me)

    async def slices_of(self, member: str, leaves: Sequence[int]) -> tuple[AuditedSlice, ...]:
        """Return `member`'s slices of `leaves` of this member's own part, with their proofs. Raises RoundError or
        PeerError if this member has not made the part."""
        made = await self.butterfly.made(self._group.peer_ids.index(self._streams.me))
        index = [each.peer_id for each in self._group.contributors].index(member)
        return tuple([(await self._streams.off_loop(made.slices_of, leaf))[index] for leaf in leaves])

    async def values_of(self, member: str) -> tuple[slice, Tensor]:
        """Return the place of this member's own part in the step's vector, and the values that `member` contributes to
        it. Raises RoundError or PeerError if this member has not made the part."""
        made = await self.butterfly.made(self._group.peer_ids.index(self._streams.me))
        return await self._streams.off_loop(made.values_of, member)

    async def answer(self, part: int, stream: Stream) -> None:
        """Answer an auditor of `part`, which this member has made."""
        made, statement = await self._answer_for(part)
        await self._streams.send(stream, statement)
        for _ in range(limits.MAX_DRAWS):
            try:
                leaf = AuditDraw.from_bytes(await stream.receive()).leaf
            except EndOfStream:
                return
            if leaf not in part_leaves(self._group, part):
                raise PeerViolation("it asks for a leaf of another part")
            for each in await self._streams.off_loop(made.slices_of, leaf):
                await self._streams.send(stream, each.to_bytes())

    async def audit(self, parts: Sequence[Data], within_s: float) -> None:
        """Audit other members' `parts`, which are complete, in about `within_s`. Raises CaughtLying, PeerViolation, and
        NotAudited."""
        self._limit_s = within_s / 2
        plan = audit_plan(self._group, self._streams.me, self._streams.scheme.codec, self._chance)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._audited(part, parts[part], count)) for part, count in plan.items()]
        audited = [task.result() for task in running]
        # all parts are checked in one call: with few values per leaf, most of the time is the overhead of a call
        lies = await self._streams.off_loop(self._lies, [case for case, _ in audited])
        errors = [*lies, *(error for _, error in audited if error is not None)]
        # a proven lie matters more than a part that could not be audited
        for error in sorted(errors, key=lambda each: (not isinstance(each, CaughtLying), isinstance(each, NotAudited))):
            raise error

    async def compare(self, parts: Sequence[Data]) -> None:
        """Raises RoundError if one of `parts`, which another member shows, is not the one that its owner has given to
        this member, or that this member has made, and IntegrityError if one cannot be decoded."""
        if await self._streams.off_loop(self.butterfly.differs_from, parts):
            raise RoundError("another member shows other parts than their owners have given")
        # the voters that show a part may have made it up; those of owners were decoded when they came
        decoded = decoded_frames(self._group, parts, self._streams.scheme.codec)
        await self._streams.off_loop(deque, decoded, 0)

    async def _answer_for(self, part: int) -> tuple[MadePart, bytes]:
        async with self._answering[part]:
            if part not in self._answers:
                group, codec, made = self._group, self._streams.scheme.codec, await self.butterfly.made(part)
                data = self.butterfly.data_made(part)
                tree, _ = await self._streams.off_loop(hashed_part, codec, group, part, data)
                statement = PartStatement(
                    run=group.run,
                    step=group.step,
                    attempt=group.attempt,
                    group_digest=self._signed.digest,
                    part=part,
                    result_root=tree.root,
                )
                self._answers[part] = made, self._sign(statement)
            return self._answers[part]

    async def _audited(self, part: int, data: Data, num_draws: int) -> tuple[_PartAudit, PeerError | None]:
        """Return the audit of `part`, whose slices are still to be compared with its result, with an error or None. The
        error says what else is wrong, or why the part could not be audited."""
        owner, backup = self._group.peer_ids[part], backup_peer(self._group, part)
        failure, violation = "", None
        # the one that gave the part comes first: an owner that has failed already is not waited for again
        makers = (backup, owner) if self.butterfly.is_from_backup(part) else (owner, backup)
        codec = self._streams.scheme.codec
        tree, magnitudes = await self._streams.off_loop(hashed_part, codec, self._group, part, data)
        case = _PartAudit(part=part, data=data, tree=tree, magnitudes=magnitudes)
        for maker in filter(None, makers):
            try:
                if maker == self._streams.me:
                    await self._look_at_own(case)
                else:
                    await self._audit_at(maker, case, num_draws)
                return case, violation
            except CaughtLying as error:
                return case, error
            except OutOfTime as error:
                failure = failure or error.message
            except PeerViolation as error:
                violation = violation or error
                if not case.statement:
                    return case, error
            except SwarmError as error:
                failure = failure or error.message
        giver = next(maker for maker in makers if maker != self._streams.me)
        return case, violation or NotAudited(
            f"it does not show how it made its part: {failure}", peer_id=giver or owner
        )

    async def _audit_at(self, maker: str, case: _PartAudit, num_draws: int) -> None:
        """Have `maker` show how it made a part. Raises PeerViolation and PeerError. Raises CaughtLying against the
        signer if what `maker` showed before a failure proves a lie."""
        shown, failure = _Slices(), None
        try:
            await self._streams.while_there(maker, self._ask(maker, case, num_draws, shown))
        except SwarmError as error:
            failure = error
        case.committed = await self._streams.off_loop(self._committed, case.part, shown)
        if len(case.committed) < len(shown):
            failure = PeerViolation("it shows other slices than their senders committed to", peer_id=maker)
        if failure is not None:
            # what it has shown so far may convict the signer
            await self._compare_now(case)
            raise failure

    async def _compare_now(self, case: _PartAudit) -> None:
        """Raise CaughtLying if a signed result does not follow from the slices that were shown for it."""
        lies = await self._streams.off_loop(self._lies, [case])
        case.committed = {}
        for error in lies:
            raise error

    async def _ask(self, maker: str, case: _PartAudit, num_draws: int, shown: _Slices) -> None:
        """Ask `maker` for the slices of drawn leaves, and add them to `shown`. Raises PeerViolation and PeerError."""
        opening, first = self._streams.opening("audit", case.part), part_leaves(self._group, case.part).start
        try:
            with blamed(maker):
                async with asyncio.timeout(self._limit_s), self._streams.open(maker, opening) as stream:
                    self._check(maker, case, await stream.receive())
                    case.drawn = case.drawn or draw_audited_leaves(case.magnitudes, num_draws, self._chance)
                    for index in case.drawn:
                        await self._streams.send(stream, AuditDraw(leaf=first + index).to_bytes())
                    await stream.finish()
                    for index in case.drawn:
                        shown[index] = await self._slices(stream, maker)
        except TimeoutError:
            raise PeerTimeout("it does not answer the audit", peer_id=maker) from None

    async def _look_at_own(self, case: _PartAudit) -> None:
        """Audit a part whose backup this member is, by making the part once more. Raises CaughtLying if the owner has
        signed another result, and RoundError if it has only sent one."""
        try:
            async with asyncio.timeout(self._limit_s):
                made = await self.butterfly.made(case.part)
        except TimeoutError:
            raise RoundError("this member, its backup, cannot make it in time") from None
        codec, data = self._streams.scheme.codec, self.butterfly.data_made(case.part)
        tree, _ = await self._streams.off_loop(hashed_part, codec, self._group, case.part, data)
        if tree.root == case.tree.root:
            return
        leaves = part_leaves(self._group, case.part)
        pairs = zip(tree.leaves(0, len(leaves)), case.tree.leaves(0, len(leaves)), strict=True)
        index = next(index for index, (mine, given) in enumerate(pairs) if mine != given)
        if case.statement:
            slices = await self._streams.off_loop(made.slices_of, leaves.start + index)
            case.committed = {index: tuple(slices)}
            await self._compare_now(case)
        raise RoundError("the part's owner has given another result than its backup makes")

    async def _slices(self, stream: Stream, maker: str) -> tuple[AuditedSlice, ...]:
        slices = []
        for _ in self._group.contributors:
            slices.append(AuditedSlice.from_bytes(await stream.receive()))
            self._streams.heard(maker)
        return tuple(slices)

    def _check(self, maker: str, case: _PartAudit, data: bytes) -> None:
        """Check that `data` is `maker`'s statement of the result, or of any result if a maker has signed this one
        already. Raises PeerViolation if it is not, and PeerError if the backup has another result."""
        signer, statement = self._read(data)
        if (signer, statement.group_digest, statement.part) != (maker, self._signed.digest, case.part):
            raise PeerViolation("it signed a statement of something else", peer_id=maker)
        if case.statement:
            return  # this maker's slices show whether the signed result is right
        if statement.result_root == case.tree.root:
            case.statement, case.signer = data, maker
            return
        if maker != self._group.peer_ids[case.part] or self.butterfly.is_from_backup(case.part):
            # the owner may have sent this member and the backup different results, or the backup a wrong one
            raise PeerError("it has another result than was given", peer_id=maker)
        raise PeerViolation("it signed another result than it gave", peer_id=maker)

    def _committed(self, part: int, shown: _Slices) -> _Slices:
        """Return the leading leaves of `shown`, up to the first one whose slices are not those that their senders
        committed to. Blocks."""
        first = part_leaves(self._group, part).start
        return dict(takewhile(lambda one: are_committed(self._group, first + one[0], one[1]), shown.items()))

    def _lies(self, cases: Sequence[_PartAudit]) -> list[CaughtLying]:
        """Return a proof against each signer whose result does not follow from the slices. Another peer may have shown
        these. Blocks."""
        group, scheme, lies = self._group, self._streams.scheme, list[CaughtLying]()
        first = {case.part: part_leaves(group, case.part).start for case in cases}
        shown = {first[case.part] + index: slices for case in cases for index, slices in case.committed.items()}
        results = reduced_leaves(group, scheme, shown)
        for case in cases:
            for index in case.committed:
                signed, leaf = part_leaf(scheme.codec, group, case.part, case.data, index), first[case.part] + index
                if results[leaf] != signed:
                    lies.append(self._caught(case, leaf, signed, shown[leaf]))
                    break
        return lies

    def _caught(self, case: _PartAudit, leaf: int, result: bytes, slices: tuple[AuditedSlice, ...]) -> CaughtLying:
        """Return the error that convicts the signer of `result`, which does not follow from `slices`."""
        index = leaf - part_leaves(self._group, case.part).start
        wrong = WrongReduction(
            group=self._signed.data,
            statement=case.statement,
            leaf=leaf,
            result=result,
            result_proof=b"".join(case.tree.proof(index, index + 1)),
            slices=slices,
        )
        # a member that committed to bytes that nobody can decode has lied, too, and the maker that accepted them hides
        # that
        bad = undecodable(self._group, self._streams.scheme.codec, leaf, slices)
        evidence = (wrong.evidence(), *(each.evidence() for each in bad))
        reason = "it signed a result that does not follow from the members' slices"
        return CaughtLying(reason, peer_id=case.signer, evidence=evidence)


@dataclass(slots=True, kw_only=True, eq=False)
class _PartAudit:
    """Holds the audit of one part: the result `data` with the hash tree over its leaves and their magnitudes, and, once
    a maker has signed it, the `statement`, its `signer`, and the leaves that were `drawn` then. `committed` are the
    slices that are still to be compared with the result."""

    part: int
    data: Data
    tree: HashTree
    magnitudes: list[float]
    statement: bytes = b""
    signer: str = ""
    drawn: list[int] = field(default_factory=list)
    committed: _Slices = field(default_factory=dict)
