"""What `--json` prints: every event, its fields, and the line people read instead. The one source of docs/events.md.

Scripts are written against these names, so a name or field is added here but never renamed or given another meaning.
`docs/events.md` is `python -m swarm_node.event_contract`, and a test holds the two together.

Emitting is `swarm_node.events`' part.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from swarm_node.command_events import COMMAND_EVENTS
from swarm_node.event_spec import TYPES, EventSpec

EVENTS: Mapping[str, EventSpec] = {
    "step": EventSpec(
        about="One numbered step of starting up is done.",
        fields={
            "number": "int: which step, from 1",
            "of": "int: how many there are",
            "title": "text: what the step is about",
            "detail": "text: what came out of it",
        },
        text="[{number}/{of}] {title}: {detail}",
    ),
    "ready": EventSpec(
        about="The node is on the network and answers `status`, `drain` and `stop`.",
        fields={
            "peer_id": "text: this node's peer id",
            "addrs": "list: multiaddrs under which others reach it, each ending in /p2p/<peer_id>",
            "name": "text: its name for people",
            "network_id": "text: the network it joined",
            "home": "text: its home directory",
        },
        text="ready as {name} ({peer_id})",
    ),
    "invite": EventSpec(
        about="What to run on another machine to join through this seed.",
        fields={"command": "text: a shell command, ready to paste"},
        text="others join with:\n\n  {command}\n",
    ),
    "waiting": EventSpec(
        about="A node that was given no work finds none that it can do; it takes what comes.",
        fields={"reason": "text: what there is, and why it is not for this node"},
        text="waiting for work: {reason}",
    ),
    "loading": EventSpec(
        about="A model is looked at: which blocks of it to take, and then their weights.",
        fields={"model": "text: the model's name"},
        text="finding and loading blocks of {model}",
    ),
    "downloading": EventSpec(
        about="Weights come from a hub: now and then, at the beginning and at the end.",
        fields={
            "model": "text: the model's name",
            "num_bytes": "int: bytes that are there",
            "total_bytes": "int: all that will be",
        },
        text="downloading {model}: {bar}",
        live=True,
    ),
    "serving": EventSpec(
        about="This node answers for the span `[start, end)` of a model.",
        fields={
            "model": "text: the model's name",
            "start": "int: the span's first block",
            "end": "int: one past the span's last block",
            "revision": "text: digest of the checkpoint; servers of different revisions never mix",
            "reason": "text: why these blocks",
        },
        text="serving blocks {start}:{end} of {model}: {reason}",
    ),
    "tokenizing": EventSpec(
        about="The run's data becomes tokens, which are kept for the next start: now and then, and at the end.",
        fields={
            "run": "text: the run's id",
            "share": "number: how much of the data has been read, from 0 to 1",
            "num_tokens": "int: tokens so far",
            "tokens_per_s": "number: how fast they come",
            "folder": "text: where they are kept, for every home of this user",
        },
        text="tokenizing: {share:.0%} read, {num_tokens} tokens, {tokens_per_s:.0f} tokens/s",
        live=True,
    ),
    "training": EventSpec(
        about="This node holds the run's state and takes part from the next interval on.",
        fields={
            "run": "text: the run's id",
            "outer_step": "int: the committed outer step it starts from",
        },
        text="training {run} from outer step {outer_step}",
    ),
    "state_fetched": EventSpec(
        about="This node has the run's committed state, every chunk of it checked.",
        fields={
            "run": "text: the run's id",
            "step": "int: the outer step of the state",
            "digest": "text: digest of the state",
            "donors": "list: peer ids of those who gave chunks; empty if nothing had to be fetched",
            "num_bytes": "int: bytes fetched",
            "seconds": "number: how long it took",
        },
        text="state of step {step} ready, {num_bytes} bytes from {num_donors} peers in {seconds:.1f} s",
    ),
    "interval": EventSpec(
        about="This node finished its inner steps of one interval.",
        fields={
            "run": "text: the run's id",
            "step": "int: the outer step that the interval leads to",
            "num_tokens": "int: tokens trained on",
            "loss": "number?: this node's mean training loss over the interval",
            "seconds": "number: how long the inner steps took",
            "tokens_per_s": "number: training speed of this node",
        },
    ),
    "outer_step": EventSpec(
        about="A round committed: the swarm took an outer step, and every replica that says so has this digest.",
        fields={
            "run": "text: the run's id",
            "step": "int: the outer step that was committed",
            "fragment": "int: which of the run's fragments it moved, from 0",
            "loss": "number?: mean training loss of the group, weighted by tokens",
            "digest": "text: digest of the committed state",
            "group": "list: peer ids of the round's members",
            "num_tokens": "int: tokens that the group trained on",
            "bytes_sent": "int: bytes this node sent for the step",
            "seconds": "number: time since the step before",
            "round_s": "number: how much of that passed after this node's interval",
            "tokens_per_s": "number: training speed of this node in its interval",
        },
        text="step {step}: loss {loss:.3f}, {tokens_per_s:.0f} tokens/s here, {num_group} nodes, {seconds:.1f} s",
    ),
    "validated": EventSpec(
        about="The committed parameters were tried on held-out data: by this node, or, in `run watch`, by the members, "
        "of whose losses it is the median.",
        fields={
            "run": "text: the run's id",
            "step": "int: the outer step of the parameters",
            "loss": "number?: their mean loss",
        },
        text="step {step}: validation loss {loss:.3f}",
    ),
    "round_aborted": EventSpec(
        about="An attempt at an outer step failed. The committed state is untouched and the work is kept.",
        fields={
            "run": "text: the run's id",
            "step": "int: the outer step that was attempted",
            "attempt": "int: which attempt, from 0",
            "reason": "text: what went wrong",
            "missing": "list: peer ids that did not answer or were at fault, as far as is known",
        },
        text="step {step}, attempt {attempt}: {reason}",
        complaint="reason",
    ),
    "contribution_late": EventSpec(
        about="An outer step was committed without what this node has trained for it: that work is lost, and its "
        "samples are leased again. The next interval begins from the new state.",
        fields={
            "run": "text: the run's id",
            "step": "int: the outer step",
            "num_tokens": "int: what was trained on; 0 while it was still computed",
            "late_s": "number?: seconds after the round's group was formed, by two clocks; null: still computed",
            "when": "text: the same in words",
        },
        text="step {step}: this node's contribution {when}: its work is lost, and its samples are leased again",
    ),
    "run_resumed": EventSpec(
        about="The run goes on without some of its members, by a resume order of its author.",
        fields={
            "run": "text: the run's id",
            "step": "int: the outer step it goes on from",
            "digest": "text: digest of that state",
            "roster": "list: peer ids of those who decide what follows",
            "sequence": "int: the order's number; a later one is greater",
        },
        text="the run's author lets {num_roster} members go on from step {step} without the others",
    ),
    "checkpoint": EventSpec(
        about="A checkpoint of the committed state is safely on disk.",
        fields={
            "run": "text: the run's id",
            "outer_step": "int: the outer step it holds",
            "path": "text: where it is",
        },
    ),
    "run_finished": EventSpec(
        about="The run's last outer step is committed.",
        fields={
            "run": "text: the run's id",
            "outer_step": "int: the last outer step",
            "digest": "text: digest of the final state",
        },
        text="run {run} finished after {outer_step} outer steps",
    ),
    "exported": EventSpec(
        about="A run's result, or the state that `run export` was asked for, is a Hugging Face directory.",
        fields={
            "run": "text: the run's id",
            "path": "text: the directory",
            "outer_step": "int: the outer step of the state",
            "digest": "text: digest of the state",
        },
        text="model of outer step {outer_step} written to {path}",
    ),
    "lingering": EventSpec(
        about="The run is finished here, and others say that they are not: it stays to give them its state.",
        fields={
            "run": "text: the run's id",
            "peers": "list: peer ids of the others; who has died is among them until its record ends",
            "seconds": "number: how long it stays at most",
        },
        text="waiting up to {seconds:.0f} s for members that have not finished ({num_peers}, dead ones among them), to "
        "give them the last state; Ctrl-C leaves at once",
    ),
    "listening": EventSpec(
        about="The gateway answers HTTP.",
        fields={"url": "text: base URL; OpenAI's API is below it under /v1"},
        text="OpenAI clients use {url}/v1",
    ),
    "dashboard": EventSpec(
        about="The dashboard answers HTTP, beside a gateway or alone.",
        fields={"url": "text: its base URL; the pages are at /, the JSON API below /api/v1"},
        text="the network is shown at {url}/",
    ),
    "metrics": EventSpec(
        about="Prometheus is answered: `--metrics` was given.",
        fields={"url": "text: what to scrape"},
        text="metrics under {url}",
    ),
    "warning": EventSpec(
        about="Something is wrong that the node can live with.",
        fields={"message": "text: what happened", "remedy": "text: what to do about it, may be empty"},
        text="warning: {message}",
        complaint="message",
    ),
    "error": EventSpec(
        about="The command cannot go on; it exits non-zero. A daemon that had begun to start says `stopped` after it.",
        fields={"message": "text: what happened", "remedy": "text: what to do about it, may be empty"},
    ),
    "draining": EventSpec(
        about="The node takes nothing new, finishes what it has and leaves.",
        fields={
            "reason": "text: who asked",
            "seconds": "number: how long it waits before it stops anyway",
        },
        text="draining ({reason}): leaving within {seconds:.0f} s; Ctrl-C leaves at once",
    ),
    "stopped": EventSpec(
        about="The node has left: it was told to, was done, or could not go on. Always the last event of a daemon.",
        fields={
            "reason": "text: why",
            "clean": "bool: whether everything in flight was finished",
        },
        text="stopped: {reason}",
    ),
    **COMMAND_EVENTS,
}
"""Those of daemons, and then those of commands."""


def problems(event: Mapping[str, object]) -> list[str]:
    """Where `event`, as printed, departs from the contract; empty if it holds to it."""
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


def render() -> str:
    """The contract as Markdown."""
    parts = [
        "# Events\n\nWith `--json` a command prints one JSON object a line on stdout; text for people goes to stderr. "
        "Every object has `event` (its name) and `time` (Unix seconds), and the fields below. Fields may be added, "
        "never renamed: ignore what you do not know. `?` marks a field that may be null.\n\n"
        "This page is generated: `python -m swarm_node.event_contract > docs/events.md`.\n"
    ]
    for name, spec in EVENTS.items():
        rows = "\n".join(
            f"| `{field}` | {about.split(': ', 1)[0]} | {about.split(': ', 1)[1]} |"
            for field, about in spec.fields.items()
        )
        parts.append(f"## `{name}`\n\n{spec.about}\n\n| field | type | meaning |\n|---|---|---|\n{rows}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(render())
