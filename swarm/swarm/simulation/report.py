"""Collects the measurements of a simulation and makes the report from them, as JSON and as one HTML page. Pure.

The report contains nothing about the machine, so equal scenarios give equal reports.
"""

from __future__ import annotations

import html
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from swarm.simulation.scenario import Scenario

Figures = dict[str, object]

ANSWERED = "share answered"
COVERED = "share of minutes with all blocks served"
IN_WORK = "share in work of the trainers that came three intervals ago"
UTILIZATION = "utilization (share of their time in intervals)"
TOKENS_PER_S = "tokens/s of one answer"
WORK = "work of the servers (share of their time, one session after the other)"

FIDELITY = (
    "Membership, record DHT, placement, routing, group forming, votes, certificates and reductions are the real code. "
    "Messages of the record DHT, and those by which trainers ask others for their standing, are not encoded, parsed or "
    "checked. Their receivers get them as objects, after the time that their size on the wire takes. The messages and "
    "bytes of a node do not include a trainer's streams.",
    "Records are signed by a stub. Each is parsed and checked once instead of by each node. What rounds sign is signed "
    "and checked for real.",
    "Connections exist at once and last: dialling, encryption and hole punching take no time. A pair that needs a "
    "relay has the relay's latency and 1 MB/s. A node can dial every peer whose id it knows.",
    "Computing takes time and computes nothing. An answer takes the time that the router expects of its chain under "
    "the load that the servers have announced. A server refuses sessions for which its cache has no room. Weights are "
    "downloaded at the rate of the server's downlink. The transfers of a round's vectors take time before the round, "
    "which then reduces short vectors: a trainer transfers two vectors, and a head two for each trainer of a full "
    "cluster. As many trainers as a round has begin a run, and the others join after its first step.",
)


@dataclass(slots=True, kw_only=True)
class Measurements:
    """The measurements of a simulation. They are taken only while `is_on`, which is False during the warm-up.

    `samples` has one sample for each minute: values at its end, by name. The other lists have one entry for each event,
    except the last one.
    """

    is_on: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    lookup_hops: list[float] = field(default_factory=list)
    lookup_s: list[float] = field(default_factory=list)
    find_group_s: list[float] = field(default_factory=list)
    round_s: list[float] = field(default_factory=list)
    answer_tokens_per_s: list[float] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)
    sent_a_minute: list[tuple[float, float]] = field(default_factory=list)
    """Messages and bytes that each node sent in a minute, of the nodes that were present from beginning to end."""

    def count(self, what: str, number: float = 1) -> None:
        """Add `number` to a count, if the measurement is on."""
        if self.is_on:
            self.counts[what] += number  # type: ignore[assignment]

    def take(self, values: list[float], value: float) -> None:
        """Append a value to one of the lists, if the measurement is on."""
        if self.is_on:
            values.append(value)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return mean, minimum, median, 99th percentile and maximum; empty if there are no values."""
    if not values:
        return {}
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "mean": sum(ordered) / len(ordered),
        "min": ordered[0],
        "median": ordered[round(0.5 * last)],
        "p99": ordered[round(0.99 * last)],
        "max": ordered[last],
    }


def mean(values: Sequence[float]) -> float:
    """Return the mean; 0 if there are no values."""
    return sum(values) / len(values) if values else 0.0


def share(part: float, whole: float) -> float | None:
    """Return `part / whole`, or None if `whole` is 0."""
    return part / whole if whole else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A report. `sections` has figures by title, and `samples` the samples of `Measurements`."""

    name: str
    scenario: Figures
    sections: Mapping[str, Figures]
    samples: Sequence[Mapping[str, float]]
    fidelity: Sequence[str] = field(default=FIDELITY)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True, allow_nan=False) + "\n"

    def to_html(self) -> str:
        """Return one page with tables and charts that loads nothing and has no script."""
        body = [f"<h1>{html.escape(self.name)}</h1>"]
        for title, figures in self.sections.items():
            body.append(f"<h2>{html.escape(title)}</h2>{_table(figures)}")
        body.append("<h2>Over time</h2>")
        names = [name for name in (self.samples[0] if self.samples else {}) if name != "minute"]
        body += [_chart(name, [(each["minute"], each[name]) for each in self.samples]) for name in names]
        body.append("<h2>What is simulated how</h2><ul>")
        body += [f"<li>{html.escape(line)}</li>" for line in self.fidelity]
        body.append(f"</ul><h2>Scenario</h2><pre>{html.escape(json.dumps(self.scenario, indent=1))}</pre>")
        return f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(self.name)}</title>{_STYLE}" + (
            "\n".join(body) + "</html>\n"
        )

    def lines(self) -> Iterable[str]:
        """Return the figures as lines for a terminal."""
        for title, figures in self.sections.items():
            yield f"{title}"
            for name, value in figures.items():
                yield f"  {name:<44} {_text(value)}"


def report_of(scenario: Scenario, measured: Measurements) -> Report:
    """Return the report of the measurements."""
    counts, last = measured.counts, measured.samples[-1] if measured.samples else {}
    num_lookups = counts["lookups"]
    sections: dict[str, Figures] = {
        "Nodes": {
            "nodes at the end": last.get("nodes"),
            "joined": counts["joined"],
            "left": counts["left"],
        },
        "Lookups": {
            "lookups": num_lookups,
            "share that found the record": share(
                num_lookups - counts["lookups failed"] - counts["records lost"], num_lookups
            ),
            "without an answer": counts["lookups failed"],
            "records of living nodes not found": counts["records lost"],
            "hops": spread(measured.lookup_hops),
            "log2 of the nodes": round(math.log2(scenario.nodes), 2),
            "seconds": spread(measured.lookup_s),
        },
        "A node's state and traffic": {
            "records held, mean": last.get("records_mean"),
            "records held, most": last.get("records_max"),
            "routing table, mean": last.get("peers_mean"),
            "routing table, most": last.get("peers_max"),
            "peers whose addresses are known, mean": last.get("addresses_mean"),
            "peers whose addresses are known, most": last.get("addresses_max"),
            "messages sent a minute": spread([messages for messages, _ in measured.sent_a_minute]),
            "bytes sent a minute": spread([num_bytes for _, num_bytes in measured.sent_a_minute]),
        },
    }
    if scenario.model is not None:
        sections["Serving"] = _serving(scenario, measured)
    if scenario.training is not None:
        sections["Training"] = _training(scenario, measured)
    return Report(
        name=scenario.name,
        scenario={name: value for name, value in asdict(scenario).items() if name != "sessions"},
        sections=sections,
        samples=measured.samples,
    )


def _serving(scenario: Scenario, measured: Measurements) -> Figures:
    counts, samples = measured.counts, measured.samples
    uncovered = [sample["blocks_without_server"] for sample in samples]
    server_s = mean([sample["servers"] for sample in samples]) * scenario.minutes * 60
    return {
        "servers at the end": samples[-1]["servers"] if samples else None,
        "blocks without a server": spread(uncovered),
        COVERED: share(sum(not each for each in uncovered), len(uncovered)),
        "requests": counts["requests"],
        ANSWERED: share(counts["answers"], counts["answers"] + counts["requests failed"]),
        "servers lost in an answer": counts["servers lost in an answer"],
        "sessions that a full server has refused": counts["sessions refused"],
        WORK: share(counts["work s"], server_s),
        TOKENS_PER_S: spread(measured.answer_tokens_per_s),
        "tokens/s of all answers": counts["answer tokens"] / (scenario.minutes * 60),
    }


def _training(scenario: Scenario, measured: Measurements) -> Figures:
    counts, samples = measured.counts, measured.samples
    trainers = [sample["trainers"] for sample in samples]
    in_work, waiting, refused = (
        spread([sample[f"trainers_{name}"] for sample in samples]) for name in ("in_work", "waiting", "refused")
    )
    trainer_s = mean(trainers) * scenario.minutes * 60
    return {
        "trainers": spread(trainers),
        "trainers in work": in_work,
        "trainers that wait for their first round": waiting,
        "trainers that the run has no place for": refused,
        IN_WORK: spread([sample["share_in_work"] for sample in samples]),
        UTILIZATION: share(counts["training s"], trainer_s),
        "seconds until a first round, besides the interval": spread(measured.find_group_s),
        "rounds committed": round(counts["rounds"]),
        "contributions": counts["contributions"],
        "megabytes of vectors that a trainer carries in an hour": share(counts["vector bytes"] / 1e6 * 3600, trainer_s),
        "attempts that failed, of all members": counts["attempts failed"],
        "seconds of a round after the interval": spread(measured.round_s),
        "tokens/s committed": counts["committed tokens"] / (scenario.minutes * 60),
    }


_STYLE = (
    "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse}td{padding:.15em 1.5em .15em 0;border-bottom:1px solid #ddd;vertical-align:top}"
    "td+td{font-variant-numeric:tabular-nums}figure{display:inline-block;margin:0 1em 1em 0}"
    "polyline{fill:none;stroke:#2563eb;stroke-width:1.5}svg{background:#f6f7f9}</style>"
)
_WIDTH, _HEIGHT = 280, 90


def _table(figures: Mapping[str, object]) -> str:
    rows = [f"<tr><td>{html.escape(name)}<td>{html.escape(_text(value))}" for name, value in figures.items()]
    return f"<table>{''.join(rows)}</table>"


def _chart(name: str, points: Sequence[tuple[float, float]]) -> str:
    """Return a line chart over the minutes, from 0 to the highest value."""
    last, highest = max(x for x, _ in points), max(y for _, y in points)
    drawn = " ".join(
        f"{x / (last or 1) * _WIDTH:.1f},{(1 - y / (highest or 1)) * (_HEIGHT - 4) + 2:.1f}" for x, y in points
    )
    title = html.escape(f"{name.replace('_', ' ')}, at most {_text(highest)}")
    return (
        f'<figure><svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{title}">'
        f'<polyline points="{drawn}"/></svg><figcaption>{title}</figcaption></figure>'
    )


def _text(value: object) -> str:
    match value:
        case None:
            return "-"
        case float():
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        case int():
            return f"{value:,}"
        case dict():
            return ", ".join(f"{name} {_text(each)}" for name, each in value.items()) or "-"
        case _:
            return str(value)
