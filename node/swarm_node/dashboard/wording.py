"""Formats numbers, times and names for the pages: the only place that formats. Pure.

None means "not known" and is written as a dash, which a screen reader reads as "not known". Names of peers are returned
`plain`; templates must still escape them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from urllib.parse import quote

from markupsafe import Markup
from swarm_protocol.identity import short_id

from swarm_node import formatting
from swarm_node.dashboard.views import NodeView, Overview
from swarm_node.formatting import MINUTE_S, plain, plural

UNKNOWN = Markup('<span class="none"><span aria-hidden="true">–</span><span class="unseen">not known</span></span>')
MAX_NAME_CHARS = 48

ADMISSION_WORDS = (
    (
        "Endorsement",
        "The author's signed statement that a committed state is part of the run's history; a node without a state "
        "begins at the newest one",
    ),
    (
        "Proved step",
        "An outer step whose certificate this dashboard has checked: the votes of two thirds of the group's members "
        "whose votes count",
    ),
    ("Probation", "The outer steps that a newcomer of an open run has to contribute to before it counts fully"),
    ("To count fully", "To be past probation: the member's vote counts, and its work has its whole weight"),
)
"""The terms that a run's page explains where it uses them."""

GLOSSARY = (
    (
        "Machines",
        (
            ("Node", "One machine that runs Swarm's program, with an identity of its own"),
            ("Peer id", "The name of a node: its public key"),
            ("Volunteer", "A node that trains a run, serves a model, or waits for such work"),
            ("Seed", "A node to which others connect first, and which relays for them; it neither serves nor trains"),
            ("Gateway", "A node that offers OpenAI's HTTP interface"),
            ("Relay", "A node that carries connections to peers that cannot be dialled"),
        ),
    ),
    (
        "Models",
        (
            ("Token", "A piece of a text, often a short word or a part of one, that models read and write"),
            ("Block", "One transformer layer, a part of a model"),
            ("Server", "A node in its role of serving some blocks of a model"),
            ("Chain", "The servers that together hold the whole model, for one request"),
            ("Cache", "A server's memory of the texts that it is working on"),
            ("Revision", "The digest of a model's files; servers of different revisions never answer together"),
            ("Manifest", "The digests of a model's files under a name, signed by its publisher"),
            ("Convicted", "A server that signed a wrong proof, as evidence shows; clients do not use it"),
        ),
    ),
    (
        "Training",
        (
            ("Run", "A signed file: model, data, optimizers, codec and rules of one training"),
            ("Author", "The identity that signed a run"),
            ("Member", "A node in its role of training a run"),
            ("Interval", "The training steps of a member between two outer steps"),
            ("Outer step", "The step that moves the model by what its members have learned since the last one"),
            ("Round", "The work of agreeing on one outer step"),
            ("Group", "The members that take part in a round"),
            ("Digest", "A short name that follows from data: members with equal digests hold equal weights"),
            ("Loss", "How badly the model predicts the next token, in nats; lower is better"),
            ("Held-out loss", "The loss on data that nobody trains on"),
            *ADMISSION_WORDS,
            ("Ban", "The exclusion of a member from the rounds of a run, because evidence proves that it lied"),
        ),
    ),
)
"""The terms that pages use, for visitors who have no documentation; `docs/glossary.md` has all."""


def number(value: float | None) -> str:
    """Write three significant digits: 0.41, 3.2, 58, 3.1k, 2.4M."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.99995:
            return formatting.digits(value / size) + unit
    return formatting.digits(value)


def count(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def _or_unknown(write: Callable[[float], str]) -> Callable[[float | None], str]:
    """Return a function that writes finite numbers as `write` does, and UNKNOWN for others and for None."""
    return lambda value: UNKNOWN if value is None or not math.isfinite(value) else write(value)


loss = _or_unknown("{:.3f}".format)
effect = _or_unknown("{:+.3f}".format)
num_bytes = _or_unknown(formatting.size)
round_trip = _or_unknown(formatting.round_trip)
duration = _or_unknown(formatting.duration)
"""`static/wording.js` must give the same text."""


@_or_unknown
def share(value: float) -> str:
    """Format a fraction as a percentage. Only a full share is 100 %."""
    return "100 %" if value >= 1 else f"{math.floor(value * 1000) / 10:g} %"


def ago(seconds: float) -> str:
    if seconds < 1:
        return "just now"
    return f"{duration(round(seconds) if seconds < 100 else round(seconds / MINUTE_S) * MINUTE_S)} ago"


def until(seconds: float) -> str:
    """Format an estimated time to wait, to the second."""
    return f"in {duration(math.ceil(seconds))}" if seconds > 0 else "any moment now"


def clock(at: float) -> str:
    """Format a Unix time in UTC. A time that no calendar has is not known."""
    when = formatting.calendar(at)
    return UNKNOWN if when is None else f"{when:%d %b %H:%M} UTC"


def iso(at: float) -> str:
    when = formatting.calendar(at)
    return "" if when is None else f"{when:%Y-%m-%dT%H:%M:%SZ}"


def named(name: str | None, peer_id: str) -> str:
    """Return a displayable name: the peer's own, or the end of its id."""
    return plain(name or "", MAX_NAME_CHARS) or short_id(plain(peer_id))


def in_url(text: str) -> str:
    return quote(text, safe="", errors="replace")


def doing(node: NodeView, finished: Collection[str] = ()) -> str:
    """Return a node's activity in a word or two, or when it lends again. A run of `finished` is no activity."""
    if node.pause and node.state == "alive":
        return "lends again later" if node.lends_again_at is None else f"lends again on {clock(node.lends_again_at)}"
    work = [word for word, has in (("serves", node.models), ("trains", set(node.runs).difference(finished))) if has]
    # a dashboard's record has no role
    idle = {"seed": "seed", "gateway": "gateway", "volunteer": "stands by"}.get(node.role, "watches")
    return " and ".join(work) or idle


def verdict(overview: Overview) -> tuple[str, str]:
    """Return the swarm's state as `(good | thin | bad | none, sentence)`."""
    broken = [model for model in overview.models if model.health == "incomplete"]
    if not overview.num_volunteers:
        return "none", "No volunteer is here yet"
    if broken:
        is_all = len(broken) == len(overview.models)
        return (
            ("bad", "The swarm cannot answer yet") if is_all else ("thin", "The swarm answers, but not for every model")
        )
    if any(model.health == "thin" for model in overview.models):
        return "thin", "The swarm works, but some blocks have only one server"
    return "good", "The swarm is healthy"


def situation(overview: Overview) -> str:
    """Return one or two sentences that say who is here and what they do."""
    if not overview.num_volunteers:
        return "The first volunteer that joins with the command on this page appears here."
    answering = sum(model.health != "incomplete" for model in overview.models)
    training = sum(run.state == "training" for run in overview.runs)
    said = [f"{plural(overview.num_volunteers, 'volunteer')} {'is' if overview.num_volunteers == 1 else 'are'} here."]
    if overview.models:
        of = "" if answering == len(overview.models) else f" of {len(overview.models)}"
        verb = "answers" if len(overview.models) == 1 else "answer"
        said.append(f"{answering}{of} {'model' if len(overview.models) == 1 else 'models'} {verb} questions;")
    else:
        said.append("No model is served yet;")
    runs = f"{plural(training, 'run')} {'is' if training == 1 else 'are'}" if training else "no run is"
    rest = ""
    if overview.num_paused:
        when = "later" if overview.lends_again_at is None else f"on {clock(overview.lends_again_at)}"
        verb = "lends" if overview.num_paused == 1 else "lend"
        rest = f" {overview.num_paused:,} {verb} nothing now. The first lends again {when}."
    return f"{' '.join(said)} {runs} training.{rest}"
