"""Describes how a run goes, in words and numbers. Pure: it turns a run's file, its members' records and its committed
steps into views."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from swarm.network.link_diagnosis import SlowLink
from swarm.training.evidence.bans import Ban
from swarm.training.outside.observer import CommittedStep, Shortage, shortage_of
from swarm.training.run.run_config import RunConfig
from swarm.training.run.signed_run import SignedRun
from swarm.training.trainer_events import OtherHistory
from swarm_protocol.identity import short_id
from swarm_protocol.records import RoundReport, TrainerRecord

from swarm_node.dashboard.history.reader import MAX_CONTRIBUTORS, MAX_STEPS, ContributionTotal, evenly
from swarm_node.dashboard.views import BanView, ContributorView, RunView, StepView
from swarm_node.formatting import plural, shown, utc
from swarm_node.network_snapshot import Listed

MAX_LOSSES = 60
MAX_BANS = 100
PHASES = ("interval", "group", "reduce", "commit", "apply")

Names = Mapping[str, str]
NameOf = Callable[[str], str]
NO_NAMES: Names = {}
Trainers = Mapping[str, TrainerRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """The last outer step and its digest, which more than half of the newest known group have signed in their
    records."""

    outer_step: int
    digest: str
    num_members: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """All that is known of a run. `steps` are the newest committed steps, oldest first. `file` is None until a member
    gave it.

    `end` is set for a run whose members left before one was asked for the proof of the last step. `endorsed_step` is
    the newest step that its author endorsed, verified here (0: none was seen). `newest` is the newest step that was
    proved here since the start. `roster` are the members that decide the next step. `other_history` are members that
    follow another history than these steps. `digests` are those of the newest step's states (see `Observer.digests`).
    """

    run: str
    file: SignedRun | None
    trainers: Listed[TrainerRecord]
    steps: Sequence[StepView]
    end: RunEnd | None = None
    slow_links: Sequence[SlowLink] = ()
    endorsed_step: int | None = None
    newest: CommittedStep | None = None
    roster: Sequence[str] = ()
    other_history: OtherHistory | None = None
    digests: Collection[str] = ()


def ban_views(bans: Sequence[Ban], names: Names) -> tuple[BanView, ...]:
    """Return views of the newest bans, newest first."""
    return tuple(
        BanView(
            peer_id=ban.verdict.peer_id,
            name=names.get(ban.verdict.peer_id) or short_id(ban.verdict.peer_id),
            outer_step=ban.verdict.step,
            kind=ban.verdict.kind,
            reason=shown(ban.verdict.reason),
            until=ban.until,
        )
        for ban in reversed(bans[-MAX_BANS:])
    )


def run_view(facts: RunFacts, at: float, names: Names = NO_NAMES) -> RunView:
    members = active(facts.trainers.records)
    outer_step, digest = _newest(facts, members)
    at_step = [record for record in members.values() if record.outer_step == outer_step and record.digest]
    config, newest = facts.file.config if facts.file else None, facts.newest
    shortage = shortage_of(config, outer_step, facts.roster, members) if config else None
    state = _state(facts, members, outer_step, is_short=shortage is not None)

    def name_of(peer_id: str) -> str:
        return names.get(peer_id) or short_id(peer_id)

    losses, other = tuple(step.loss for step in facts.steps[-MAX_LOSSES:]), facts.other_history
    apart = f" But {other.words(name_of)}; {other.remedy}." if other is not None else ""
    return RunView(
        run=shown(facts.run),
        name=shown(config.name) if config else None,
        signed_by=facts.file.peer_id if facts.file else None,
        state=state,
        words=_words(facts, state, members, outer_step, shortage, name_of) + apart,
        outer_step=outer_step,
        outer_steps=config.outer_steps if config else None,
        loss=losses[-1] if losses else None,
        losses=losses,
        num_members=len(members),
        num_agreeing=sum(record.digest.hex() in {digest, *facts.digests} for record in at_step),
        num_at_step=len(at_step),
        digest=digest,
        # members of a waiting run still announce the speed of their last step
        tokens_per_s=sum(each.tokens_per_s for each in members.values() if state == each.state == "training") or None,
        projected_end=_projected_end(facts, at) if state == "training" else None,
        endorsed_step=facts.endorsed_step,
        num_on_probation=newest.num_on_probation if newest else None,
        num_trainers=newest.num_trainers if newest else None,
        entrance=_entrance(config) if config else None,
        needs_invitation=config is not None and config.entrance.required,
        slow_links=tuple(each.words(name_of) for each in facts.slow_links),
    )


def remembered_view(facts: RunFacts) -> RunView:
    """Return the view of a run that only an earlier dashboard has seen, from at least one of its steps."""
    newest = facts.steps[-1]
    view = run_view(facts, newest.at)
    words = f"Not seen since {utc(newest.at)}. The history has its steps up to outer step {newest.outer_step}."
    words = f"{view.words} {words}" if view.state == "finished" else words
    return view.model_copy(update={"words": words, "remembered": newest.at})


def active(trainers: Trainers) -> dict[str, TrainerRecord]:
    """Return the trainers that are not leaving."""
    return {peer_id: record for peer_id, record in trainers.items() if record.state != "leaving"}


def end_of(file: SignedRun, group: Collection[str], trainers: Trainers) -> RunEnd | None:
    """Return the run's end if more than half of `group` say that they have finished with equal weights.

    `group` is the group of the newest proved step. If it is empty because no step was seen, all present members count.
    """
    members, last = active(trainers), file.config.outer_steps
    asked = group or members
    said = Counter(
        record.digest
        for peer_id, record in members.items()
        if peer_id in asked and record.state == "finished" and record.outer_step == last and record.digest
    )
    for digest, num_members in said.most_common(1):
        if 2 * num_members > len(asked):
            return RunEnd(outer_step=last, digest=digest.hex(), num_members=num_members)
    return None


def num_parameters(trainers: Trainers) -> int | None:
    sizes = [record.num_parameters for record in trainers.values() if record.num_parameters]
    return Counter(sizes).most_common(1)[0][0] if sizes else None


def step_view(
    step: CommittedStep,
    before: StepView | None,
    reports: Mapping[str, RoundReport],
    validation_losses: Mapping[str, float],
    parameters: int | None,
    at: float,
) -> StepView:
    """Return the view of a committed step.

    `reports` and `validation_losses` (on held-out data) are of this step, by member. Those of peers outside its group
    are ignored.
    """
    own = [report for peer_id, report in reports.items() if peer_id in step.group]
    losses = [loss for peer_id, loss in validation_losses.items() if peer_id in step.group]
    known = {phase for each in own for phase in each.phases_s}
    # in the order of a round; unknown phases of other versions come last
    phases = [*(phase for phase in PHASES if phase in known), *sorted(known.difference(PHASES))]
    sent = [report.bytes_sent for report in own]
    return StepView.of(
        step,
        at=at,
        num_members=step.num_trainers,
        seconds=max(0.0, at - before.at) if before and before.outer_step == step.outer_step - 1 else None,
        phases_s={
            shown(phase): median(report.phases_s[phase] for report in own if phase in report.phases_s)
            for phase in phases
        },
        bytes_per_parameter=median(sent) / parameters if sent and parameters else None,
        validation_loss=median(losses) if losses else None,
    )


def contributors(
    facts: RunFacts, done: Iterable[ContributionTotal], names: Names, since: Mapping[str, float], at: float
) -> tuple[ContributorView, ...]:
    """Return the members, and former members of steps that this dashboard has seen, most tokens first."""
    by_peer = {each.peer_id: each for each in done}
    members = active(facts.trainers.records)
    scores = held_out_scores(facts)
    views = [
        contributor_view(
            peer_id, facts.run, members.get(peer_id), by_peer.get(peer_id), name=names.get(peer_id), since=since, at=at
        ).model_copy(update={"held_out_score": scores.get(peer_id)})
        for peer_id in members.keys() | by_peer.keys()
    ]
    views.sort(key=lambda view: (-view.tokens, view.name, view.peer_id))
    return tuple(views[:MAX_CONTRIBUTORS])


def held_out_scores(facts: RunFacts) -> dict[str, float]:
    """Return the median score of each trainer that most members with the newest committed state report.

    Scores are part of that state, so honest members report equal ones.
    """
    members = active(facts.trainers.records)
    outer_step, digest = _newest(facts, members)
    said = [each for each in members.values() if (each.outer_step, each.digest.hex()) == (outer_step, digest)]
    peers = {peer_id for record in said for peer_id in record.held_out_scores}
    tellers = {peer: [each.held_out_scores[peer] for each in said if peer in each.held_out_scores] for peer in peers}
    return {peer: median(scores) for peer, scores in tellers.items() if 2 * len(scores) > len(said)}


def contributor_view(
    peer_id: str,
    run: str,
    record: TrainerRecord | None,
    done: ContributionTotal | None,
    *,
    name: str | None,
    since: Mapping[str, float],
    at: float,
) -> ContributorView:
    """Return one contributor. `record` is None for a former member. `since` has when this dashboard first saw each
    member."""
    return ContributorView(
        peer_id=peer_id,
        name=name or short_id(peer_id),
        run=shown(run),
        state=record.state if record else "gone",
        outer_step=record.outer_step if record else 0,
        tokens_per_s=(record.tokens_per_s or None) if record else None,
        tokens=done.tokens if done else 0,
        rounds=done.rounds if done else 0,
        uptime_s=max(0.0, at - since[peer_id]) if record and peer_id in since else None,
    )


def downsampled(steps: Sequence[StepView]) -> tuple[StepView, ...]:
    """Return at most MAX_STEPS steps, evenly chosen, with the first and the last. Validated steps are preferred."""
    return tuple(steps[at] for at in evenly([step.validation_loss is not None for step in steps], MAX_STEPS))


def _newest(facts: RunFacts, members: Trainers) -> tuple[int, str]:
    """Return the newest committed step and its digest: the proved one, or else the one that most members report."""
    if facts.end is not None:
        return facts.end.outer_step, facts.end.digest
    if facts.steps:
        return facts.steps[-1].outer_step, facts.steps[-1].digest
    claims = sorted(record.outer_step for record in members.values() if record.digest)
    if not claims:
        return 0, ""
    # at least half of the members report this step or a later one, so a false claim of 2**40 changes nothing
    outer_step = claims[(len(claims) - 1) // 2]
    digests = Counter(record.digest.hex() for record in members.values() if record.outer_step == outer_step)
    return outer_step, digests.most_common(1)[0][0]


def _state(
    facts: RunFacts, members: Trainers, outer_step: int, *, is_short: bool
) -> Literal["training", "finished", "waiting", "gone"]:
    if facts.file is not None and outer_step >= facts.file.config.outer_steps:
        return "finished"
    if not members:
        return "gone"
    states = Counter(record.state for record in members.values())
    if not states["training"] and states["finished"]:
        # a finished member has a proof of the last step, which one of the next polls fetches
        return "finished" if facts.file is None else "training"
    return "waiting" if is_short or not states["training"] else "training"


def _words(
    facts: RunFacts, state: str, members: Trainers, outer_step: int, shortage: Shortage | None, name_of: NameOf
) -> str:
    of = f" of {facts.file.config.outer_steps:,}" if facts.file else ""
    if facts.end is not None:
        seen = f"; this dashboard has seen the proof of step {facts.steps[-1].outer_step}" if facts.steps else ""
        said = f"{plural(facts.end.num_members, 'member')} {'says' if facts.end.num_members == 1 else 'say'}"
        return f"Finished: {said} that outer step {outer_step:,}{of} is committed{seen}."
    if state == "finished":
        return f"Finished: outer step {outer_step:,}{of} is committed."
    if state == "gone":
        return f"Nobody trains this run any more. Its last outer step is {outer_step:,}{of}."
    if state == "waiting" and shortage is not None:
        remedy = f" {shortage.remedy[0].upper()}{shortage.remedy[1:]}." if shortage.remedy else ""
        return f"Waiting: {shortage.words(name_of)}.{remedy}"
    if state == "waiting":
        return f"Waiting: no member is ready for a step, {plural(len(members), 'member')} joining."
    done = f"outer step {outer_step:,}{of} is committed" if outer_step else "no outer step is committed yet"
    return f"Training: {done}, {plural(len(members), 'member')}."


def _entrance(config: RunConfig) -> str:
    entrance = config.entrance
    return "; ".join(filter(None, (entrance.who_may_join, entrance.who_is_welcome(len(config.inviters)))))


def _projected_end(facts: RunFacts, at: float) -> float | None:
    """Estimate the run's end from the pace of the newest steps seen here."""
    recent = facts.steps[-20:]
    if facts.file is None or len(recent) < 2:
        return None
    first, last = recent[0], recent[-1]
    pace_s = (last.at - first.at) / (last.outer_step - first.outer_step)
    return max(at, last.at + pace_s * (facts.file.config.outer_steps - last.outer_step)) if pace_s > 0 else None
