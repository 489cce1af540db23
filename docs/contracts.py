"""Writes the pages of events and metrics from their contracts in the code: `.venv/bin/python docs/contracts.py`.

They are kept in the repository, where they are read as well; tests compare them with the code.
"""

from __future__ import annotations

from pathlib import Path

from swarm_node.events.emitter import EVENTS
from swarm_node.metrics.metric_contract import GROUPS, MetricSpec

GENERATED = "This page is generated: `.venv/bin/python docs/contracts.py`.\n"


def events_page() -> str:
    parts = [
        "# Events\n\nWith `--json` a command prints one JSON object a line on stdout; text for people goes to stderr. "
        "Every object has `event` (its name) and `time` (Unix seconds), and the fields below. Fields may be added, "
        f"never renamed: ignore what you do not know. `?` marks a field that may be null.\n\n{GENERATED}"
    ]
    for name, spec in EVENTS.items():
        described = ((field, *about.split(": ", 1)) for field, about in spec.fields.items())
        rows = "\n".join(f"| `{field}` | {kind} | {meaning} |" for field, kind, meaning in described)
        parts.append(f"## `{name}`\n\n{spec.about}\n\n| field | type | meaning |\n|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def metrics_page() -> str:
    parts = [
        "# Metrics\n\nWith `--metrics HOST:PORT` a daemon serves Prometheus metrics at `http://HOST:PORT/metrics` "
        "from its start on, also while it cannot join (port 0: any free port; the `metrics` event has the address). "
        "Without the option, no port is opened. On loopback, only requests for an IP address or a name without a "
        "dot are answered, others get status 421; on other addresses, any name is answered. A "
        "gateway also serves metrics on its own port; with `--api-keys` this needs a key, which Prometheus reads from "
        "`credentials_file` under `authorization`. Metrics may be added, never renamed. The last column says when a "
        "value changes; a histogram has its number of buckets."
        f"\n\n{GENERATED}"
    ]
    for title, (about, part) in GROUPS.items():
        rows = "\n".join(_row(name, spec) for name, spec in part.items())
        parts.append(f"## {title}\n\n{about}\n\n| metric | kind | meaning | changes |\n|---|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def _row(name: str, spec: MetricSpec) -> str:
    kind = f"{spec.kind} ({len(spec.buckets)})" if spec.buckets else spec.kind
    labels = "".join(f"<br>`{label}`: {values}" for label, values in spec.labels.items())
    return f"| `{name}` | {kind} | {spec.about}{labels} | {spec.moves} |"


if __name__ == "__main__":
    folder = Path(__file__).parent / "reference"
    (folder / "events.md").write_text(events_page(), encoding="utf-8")
    (folder / "metrics.md").write_text(metrics_page(), encoding="utf-8")
