"""What `--json` prints: every event, its fields, and the line people read instead.

Scripts are written against these names, so a name or field may be added here but never renamed or given another
meaning. `daemon_events` and `command_events` declare them, and are the one source
of `docs/reference/events.md`: `docs/contracts.py` writes it, and a test compares the two. `swarm_node.events.emitter`
prints the events.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarm_node.events.command_events import COMMAND_EVENTS
from swarm_node.events.daemon_events import DAEMON_EVENTS
from swarm_node.events.event_spec import TYPES, EventSpec

EVENTS: Mapping[str, EventSpec] = {**DAEMON_EVENTS, **COMMAND_EVENTS}
"""Every event by name: first those of daemons, then those of commands that end by themselves."""


def problems(event: Mapping[str, object]) -> list[str]:
    """Return where a printed `event` departs from the contract; empty if it conforms."""
    name = event.get("event")
    spec = EVENTS.get(name) if isinstance(name, str) else None
    if spec is None:
        return [f"unknown event {name!r}"]
    given = set(event) - {"event", "time"}
    found = [f"{name} lacks {field}" for field in spec.fields if field not in given]
    found += [f"{name} has the undocumented field {field}" for field in sorted(given - set(spec.fields))]
    for field in spec.fields:
        type_name, nullable = spec.field_type(field)
        value = event.get(field)
        if field not in given or (nullable and value is None):
            continue
        if not isinstance(value, TYPES[type_name]) or (isinstance(value, bool) and type_name != "bool"):
            found.append(f"{name}.{field} is {value!r}, not {type_name}")
    return found
