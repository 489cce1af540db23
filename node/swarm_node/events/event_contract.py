"""What `--json` prints: every event, its fields, and the line people read instead. The one source of docs/events.md.

Scripts are written against these names, so a name or field may be added here but never renamed or given another
meaning. `docs/contracts.py` writes `docs/events.md`, and a test compares the two.
`swarm_node.events.emitter` prints the events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TYPES: Mapping[str, tuple[type, ...]] = {
    "text": (str,),
    "int": (int,),
    "number": (int, float),
    "bool": (bool,),
    "list": (list, tuple),
    "object": (dict,),
}
"""The types of a field by name. A trailing `?` in a spec means that the field may be null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSpec:
    """One kind of event. `fields` maps a name to "type: meaning"; `text` is the line for people, or empty.

    `live`: on a terminal the line replaces the one before. `repeated_field` is the field whose value is the same
    when an event repeats: people then read it the first time, the 10th, the 100th….
    """

    about: str
    fields: Mapping[str, str]
    text: str = ""
    live: bool = False
    repeated_field: str = ""

    def field_type(self, name: str) -> tuple[str, bool]:
        """Return the type's name, and whether null is allowed."""
        type_name = self.fields[name].split(":", 1)[0]
        return type_name.removesuffix("?"), type_name.endswith("?")


def _event(about: str, text: str = "", /, *, live: bool = False, repeated_field: str = "", **fields: str) -> EventSpec:
    return EventSpec(about=about, text=text, live=live, repeated_field=repeated_field, fields=fields)


EVENTS: Mapping[str, EventSpec] = {
    "step": _event(
        "One numbered step of starting up is done.",
        "[{number}/{of}] {title}: {detail}",
        number="int: which step, from 1",
        of="int: how many there are",
        title="text: what the step is about",
        detail="text: what came out of it",
    ),
    "ready": _event(
        "The node is on the network and answers `status`, `drain` and `stop`.",
        "ready as {name} ({peer_id})",
        peer_id="text: this node's peer id",
        addrs="list: multiaddrs under which others reach it, each ending in /p2p/<peer_id>",
        name="text: its name for people",
        network_id="text: the network it joined",
        home="text: its home directory",
    ),
    "invite": _event(
        "What to run on another machine to join through this seed.",
        "others join with:\n\n  {command}\n",
        command="text: a shell command, ready to paste",
    ),
    "network_created": _event(
        "`invite --new-network` made a private network.",
        "this home owns the private network {network_id}\n"
        "  start its first node: swarm-node seed --listen /ip4/0.0.0.0/tcp/4001\n"
        "  then invite others:   swarm-node invite",
        network_id="text: the network's id, which names its owner's key",
        home="text: the home that holds the key",
    ),
    "invited": _event(
        "An invitation to a private network was signed. Its text is in no event: it goes to stdout, or to stderr with "
        "`--json`, or to `file`.",
        "invitation {serial} until {until}, with the right to {rights_text}. Whoever has it can join",
        serial="text: its serial, by which it is revoked",
        network_id="text: the network",
        rights="list: some of join, serve, train, ask",
        rights_text="text: the same as one line",
        expires_at="number: Unix seconds",
        until="text: the same in local time",
        file="text: the file that holds it; empty: none",
    ),
    "invitations": _event(
        "The invitations that a home has signed, for `invite list --json`.",
        network_id="text: the network",
        invitations="list: objects with serial, rights, issued_at, expires_at, node, note and state",
    ),
    "revoked": _event(
        "An invitation to a private network was revoked.",
        "invitation {serial} is revoked",
        serial="text: its serial",
        told="bool: whether a member was told, which passes it on; otherwise the next node of this home does",
    ),
    "waiting": _event(
        "A node that was given no work finds none that it can do; it takes what comes.",
        "waiting for work: {reason}",
        reason="text: what there is, and why it is not for this node",
    ),
    "loading": _event(
        "A model is looked at: which blocks of it to take, and then their weights.",
        "finding and loading blocks of {model}",
        model="text: the model's name",
    ),
    "downloading": _event(
        "Weights come from a hub: now and then, at the beginning and at the end.",
        "downloading {model}: {bar}",
        live=True,
        model="text: the model's name",
        num_bytes="int: bytes that are there",
        total_bytes="int: all that will be",
    ),
    "manifest": _event(
        "The model that this node serves is published: its publisher has signed a manifest of its files.",
        "{model} is published by {publisher} (manifest {digest:.12}); files that differ from it are refused",
        model="text: the model's name",
        publisher="text: the publisher's peer id",
        digest="text: digest of the manifest",
    ),
    "hashing": _event(
        "The weights of a model are read to compute their digests: now and then, at the beginning and at the end.",
        "hashing {model}: {bar}",
        live=True,
        model="text: the model's name",
        num_bytes="int: bytes that have been read",
        total_bytes="int: all bytes of the weights",
    ),
    "serving": _event(
        "This node answers for the span `[start, end)` of a model.",
        "serving blocks {start}:{end} of {model}: {reason}",
        model="text: the model's name",
        start="int: the span's first block",
        end="int: one past the span's last block",
        revision="text: digest of the checkpoint; servers of different revisions never mix",
        reason="text: why these blocks",
    ),
    "tokenizing": _event(
        "The run's data becomes tokens, which are kept for the next start: now and then, and at the end.",
        "tokenizing: {share:.0%} read, {num_tokens} tokens, {tokens_per_s:.0f} tokens/s",
        live=True,
        run="text: the run's id",
        share="number: how much of the data has been read, from 0 to 1",
        num_tokens="int: tokens so far",
        tokens_per_s="number: how fast they come",
        folder="text: where they are kept, for every home of this user",
    ),
    "training": _event(
        "This node holds the run's state and takes part from the next interval on.",
        "training {run} from outer step {outer_step}",
        run="text: the run's id",
        outer_step="int: the committed outer step it starts from",
    ),
    "state_fetched": _event(
        "This node has the run's committed state, every chunk of it checked.",
        "state of step {step} ready, {num_bytes} bytes from {num_donors} peers in {seconds:.1f} s",
        run="text: the run's id",
        step="int: the outer step of the state",
        digest="text: digest of the state",
        donors="list: peer ids of those who gave chunks; empty if nothing had to be fetched",
        num_bytes="int: bytes fetched",
        seconds="number: how long it took",
    ),
    "interval": _event(
        "This node finished its inner steps of one interval.",
        run="text: the run's id",
        step="int: the outer step that the interval leads to",
        num_tokens="int: tokens trained on",
        loss="number?: this node's mean training loss over the interval",
        seconds="number: how long the inner steps took",
        tokens_per_s="number: training speed of this node",
    ),
    "outer_step": _event(
        "A round committed: the swarm took an outer step, and every replica that says so has this digest.",
        "step {step}: loss {loss:.3f}, {tokens_per_s:.0f} tokens/s here, {num_trainers} trainers, {seconds:.1f} s",
        run="text: the run's id",
        step="int: the outer step that was committed",
        fragment="int: which of the run's fragments it moved, from 0",
        loss="number?: mean training loss of the group, weighted by tokens",
        digest="text: digest of the committed state",
        group="list: peer ids of the round's members",
        num_trainers="int: the members, and the trainers whose work they brought",
        num_tokens="int: tokens that all of these trained on",
        bytes_sent="int: bytes this node sent for the step",
        seconds="number: time since the step before",
        round_s="number: how much of that passed after this node's interval",
        tokens_per_s="number: training speed of this node in its interval",
    ),
    "validated": _event(
        "The committed parameters were tried on held-out data: by this node, or, in `run watch`, by the members, "
        "of whose losses it is the median.",
        "step {step}: validation loss {loss:.3f}",
        run="text: the run's id",
        step="int: the outer step of the parameters",
        loss="number?: their mean loss",
    ),
    "slow_link": _event(
        "In the last rounds a member or a link between two was slower, or lost more, than those of the other members.",
        "{words}",
        run="text: the run's id",
        kind="text: sender, receiver or link",
        sender="text: peer id of who sends, empty for a receiver",
        receiver="text: peer id of who receives, empty for a sender",
        slowdown="number: its transfer time divided by the usual one",
        words="text: the same in words",
    ),
    "round_aborted": _event(
        "An attempt at an outer step failed. The committed state is untouched and the work is kept.",
        "step {step}, attempt {attempt} failed: {reason}",
        repeated_field="reason",
        run="text: the run's id",
        step="int: the outer step that was attempted",
        attempt="int: which attempt, from 0",
        reason="text: what went wrong",
        missing="list: peer ids that did not answer or were at fault, as far as is known",
    ),
    "member_convicted": _event(
        "Evidence that this node has checked proves that a member of the run lied. It takes part in no round with this "
        "node, for as long as the run's ban_steps say.",
        "convicted in step {step}, banned {how_long}: {peer_id}, {reason}",
        run="text: the run's id",
        step="int: the outer step of the lie",
        peer_id="text: who lied",
        kind="text: the kind of evidence, such as wrong_reduction",
        reason="text: what it did",
        until="int?: the last outer step of which it is kept out; null: it is banned for good",
        how_long="text: the same in words",
    ),
    "interval_validated": _event(
        "This node has computed another member's interval once more, as the run's validation_rate draws, or since "
        "others accuse it. In that step it contributes nothing.",
        "the interval of {peer_id} for step {step} was computed once more: {tier}, distance {distance:.3g}",
        run="text: the run's id",
        step="int: the outer step that the interval was for",
        peer_id="text: whose interval",
        tier="text: exact (equal bytes), close (within the run's validation_tolerance) or wrong",
        distance="number: the norm of the difference, relative to that of the recomputed values; at most 1e6",
    ),
    "falsely_accused": _event(
        "A member accuses another one of not having trained what it sent, and this node, which computed the interval "
        "once more, finds that it did. It does not listen to that accuser any more; nobody is banned.",
        "{accuser} accuses {peer_id} in step {step} of what is not so",
        run="text: the run's id",
        step="int: the outer step that the interval was for",
        peer_id="text: who is accused",
        accuser="text: who accuses",
    ),
    "contribution_late": _event(
        "An outer step was committed without what this node has trained for it: that work is lost, and its "
        "samples are leased again. The next interval begins from the new state.",
        "step {step}: this node's contribution {when}: its work is lost, and its samples are leased again",
        run="text: the run's id",
        step="int: the outer step",
        num_tokens="int: what was trained on; 0 while it was still computed",
        late_s="number?: seconds after the round's group was formed, by two clocks; null: still computed",
        when="text: the same in words",
    ),
    "run_resumed": _event(
        "The run goes on without some of its members, by a resume order of its author.",
        "by order of the run's author, {num_roster} members continue from step {step} without the others",
        run="text: the run's id",
        step="int: the outer step it goes on from",
        digest="text: digest of that state",
        roster="list: peer ids of those who decide what follows",
        sequence="int: the order's number; a later one is greater",
    ),
    "on_probation": _event(
        "This node has joined an open run that was under way, and counts for less until it has contributed to more "
        "steps, or has just done so.",
        "on probation: {steps_left} more outer steps until this node counts fully",
        run="text: the run's id",
        step="int: the outer step of the state that says so",
        steps_left="int: the steps to which it still has to contribute; 0: it counts fully from now on",
    ),
    "state_endorsed": _event(
        "The run's author has endorsed a state of its history, from which newcomers begin. If this node's own history "
        "has another state there, it was joined to something that is not the run.",
        "the run's author endorses step {step}, state {digest:.12}: newcomers begin from there",
        run="text: the run's id",
        step="int: the outer step it is of",
        digest="text: digest of that state",
        sequence="int: the endorsement's number; a later one is greater",
        is_other="bool: whether this node's history has another state of that step",
    ),
    "checkpoint": _event(
        "A checkpoint of the committed state is safely on disk.",
        run="text: the run's id",
        outer_step="int: the outer step it holds",
        path="text: where it is",
    ),
    "run_finished": _event(
        "The run's last outer step is committed.",
        "run {run} finished after {outer_step} outer steps",
        run="text: the run's id",
        outer_step="int: the last outer step",
        digest="text: digest of the final state",
    ),
    "exported": _event(
        "A run's result, or the state that `run export` was asked for, is a Hugging Face directory.",
        "model of outer step {outer_step} written to {path}",
        run="text: the run's id",
        path="text: the directory",
        outer_step="int: the outer step of the state",
        digest="text: digest of the state",
    ),
    "lingering": _event(
        "The run is finished here, and others say that they are not: it stays to give them its state.",
        "waiting up to {seconds:.0f} s to give the last state to members that have not finished ({num_peers}, of which "
        "some may be gone); Ctrl-C leaves at once",
        run="text: the run's id",
        peers="list: peer ids of the others; who has died is among them until its record ends",
        seconds="number: how long it stays at most",
    ),
    "listening": _event(
        "The gateway answers HTTP.",
        "OpenAI clients use {url}/v1",
        url="text: base URL; OpenAI's API is below it under /v1",
    ),
    "dashboard": _event(
        "The dashboard answers HTTP, beside a gateway or alone.",
        "the network is shown at {url}/",
        url="text: its base URL; the pages are at /, the JSON API below /api/v1",
    ),
    "metrics": _event(
        "Prometheus is answered: `--metrics` was given.", "Prometheus metrics are at {url}", url="text: what to scrape"
    ),
    "warning": _event(
        "Something is wrong that the node can live with.",
        "warning: {message}",
        repeated_field="message",
        message="text: what happened",
        remedy="text: what to do about it, may be empty",
    ),
    "error": _event(
        "The command cannot go on; it exits non-zero. A daemon that had begun to start says `stopped` after it.",
        message="text: what happened",
        remedy="text: what to do about it, may be empty",
    ),
    "draining": _event(
        "The node takes nothing new, finishes what it has and leaves.",
        "draining ({reason}): leaving {within}",
        reason="text: who asked",
        seconds="number: how long it waits before it stops anyway",
    ),
    "pausing": _event(
        "The hours in which the node lends are over, or its monthly traffic is nearly used up: it takes "
        "nothing new, and finishes what it has.",
        "{reason}; work in flight has {seconds:.0f} s to finish",
        reason="text: why, and when it lends again",
        seconds="number: how long it waits before it stops anyway",
    ),
    "paused": _event(
        "The node lends nothing for now, and stays in the network. It begins again by itself.",
        "paused: {reason}",
        reason="text: why, and when it lends again",
        until="number: when it lends again, in Unix seconds",
    ),
    "stopped": _event(
        "The node has left: it was told to, was done, or could not go on. Always the last event of a daemon.",
        "stopped: {reason}",
        reason="text: why",
        clean="bool: whether everything in flight was finished",
    ),
    "run_written": _event(
        "What `run init` prints: there is a new run file to edit.", "wrote {path}: edit it", path="text: where it is"
    ),
    "evidence": _event(
        "What `evidence verify` and `evidence list` print: what a file of evidence proves, which was checked offline.",
        "{peer_id} lied: {reason} of {run}; it is banned {how_long} ({path})",
        path="text: the file",
        run="text: the run's id",
        peer_id="text: who lied",
        kind="text: the kind of evidence, such as wrong_reduction",
        step="int: the outer step of the lie",
        reason="text: what it did",
        until="int?: the last outer step of which it is kept out; null: it is banned for good",
        how_long="text: the same in words",
    ),
    "run_problem": _event(
        "What `run sign` finds impossible in a run file; an `error` follows.",
        "  {problem}",
        problem="text: the setting, its value, and what to use instead",
    ),
    "run": _event(
        "What `run sign` and `run show` print: what a run file describes and what it costs.",
        path="text: the file",
        run="text?: the run's id; null without a signature that holds",
        name="text: the run's name",
        signed_by="text?: peer id of the author; null without a signature that holds",
        issued_at="int?: when it was signed, in Unix seconds",
        problem="text: why the signature does not hold; empty if it does",
        parameters="int: of the model",
        outer_steps="int: outer steps of the run",
        interval_steps="int: inner steps between two of them",
        data="text: what is trained on",
        data_digest="text: what pins the data; empty: any data will do",
        data_revision="text: the commit of a data set on the hub; empty: the newest one, or there is none",
        start="text: the checkpoint that it starts from; empty: weights drawn from its seed",
        start_digest="text: what pins the checkpoint; empty: nothing does",
        genesis="text: what pins the run's first state; empty: nothing does",
        member_tokens="int: tokens that a member trains on for an outer step",
        group_tokens="list: the same for the smallest and for the largest round, with the members' followers",
        member_bytes="int: bytes that a member of a large group sends for an outer step",
        memory_bytes="int: memory that a member on a CPU needs in bytes, activations left out",
    ),
    "watching": _event(
        "What `run watch` prints first: it is on the network and looks for the run.",
        "watching {run}: {outer_steps} outer steps, signed by {signed_by}",
        run="text: the run's id",
        signed_by="text: peer id of the run's author",
        outer_steps="int: outer steps of the run",
    ),
    "committed": _event(
        "The watched run has taken an outer step; the members' certificate was checked.",
        "step {step}/{of}: loss {loss:.3f}, {num_trainers} trainers, {tokens_per_s:.0f} tokens/s in all, "
        "state {digest:.12}",
        run="text: the run's id",
        step="int: the outer step",
        of="int: the run's last one",
        loss="number?: mean training loss of the group, weighted by tokens",
        digest="text: digest of the committed state",
        group="list: peer ids of the round's members",
        num_trainers="int: the members, and the trainers whose work they brought",
        num_tokens="int: tokens that all of these trained on",
        tokens_per_s="number: what the members say they do, together",
        on_probation="list: peer ids of those of the group that have not proven themselves yet",
    ),
    "members": _event(
        "Who trains the watched run, whenever members or their states have changed.",
        "members: {summary}",
        run="text: the run's id",
        members="list: for each peer_id, state (joining, training, finished), outer_step, tokens_per_s, loss",
        summary="text: how many there are in each state",
    ),
    "resume_planned": _event(
        "What `run resume` found, and what it signs.",
        "{run} continues from outer step {outer_step}, state {digest:.12}, with {num_roster} members; left out: "
        "{left_out_names}",
        run="text: the run's id",
        outer_step="int: the outer step to go on from",
        digest="text: digest of that state",
        roster="list: peer ids of those who would decide what follows",
        left_out="list: peer ids of the last members who would not",
        left_out_names="text: the ends of these",
    ),
    "resume_not_signed": _event(
        "`run resume` was not told --yes.",
        "nothing was signed. The order discards all that the members left out have done since that step: make sure "
        "that they are gone, then run the command again with --yes",
        run="text: the run's id",
    ),
    "resume_not_needed": _event(
        "`run resume` was not told --yes, and enough members answered for the run to go on by itself.",
        "nothing was signed, as {run} can continue without an order: it is at outer step {outer_step}, and "
        "{num_answered} of its {num_members} members answered. --yes signs the order all the same",
        run="text: the run's id",
        outer_step="int: its newest outer step",
        members="list: peer ids of that step's members",
        answered="list: peer ids of those among them that answered",
    ),
    "resume_delivered": _event(
        "Members have the resume order, and pass it on.",
        "{num_peers} members have the order: the run continues from outer step {outer_step}",
        run="text: the run's id",
        outer_step="int: the outer step it goes on from",
        peers="list: peer ids of those who took it",
    ),
    "endorsement_planned": _event(
        "What `run endorse` found, and what it signs.",
        "{run} is at outer step {outer_step}, state {digest:.12}, of the members {roster_names}; {basis}",
        run="text: the run's id",
        outer_step="int: the outer step of the state",
        digest="text: digest of that state",
        roster="list: peer ids of the members of that state",
        roster_names="text: the ends of these",
        holders="list: peer ids of those who show it",
        after="int?: the outer step that was endorsed before; null: none",
        basis="text: why this state is taken for the run's, in words",
    ),
    "endorsement_not_signed": _event(
        "`run endorse` was not told --yes.",
        "nothing was signed. From an endorsement on, newcomers accept only what follows from it: make sure that these "
        "are the run's members, then run the command again with --yes",
        run="text: the run's id",
    ),
    "endorsement_delivered": _event(
        "Members have the endorsement, and pass it on.",
        "{num_peers} members have the endorsement of outer step {outer_step}",
        run="text: the run's id",
        outer_step="int: the outer step that was endorsed",
        peers="list: peer ids of those who took it",
    ),
    "run_left": _event(
        "The watched run's members said that it is finished, and left before `run watch` could see the proof.",
        "the members of run {run} said that it is finished, and left before they proved it: {outer_step} outer "
        "steps, loss {loss:.3f}, state {digest:.12} (checked up to step {checked})",
        run="text: the run's id",
        outer_step="int: the last outer step",
        digest="text: digest of the final state, as a member said it",
        loss="number?: that member's training loss in its last interval",
        checked="int: the last outer step whose certificate was checked; 0 for none",
    ),
    "leaving": _event(
        "What `drain` and `stop` print first: the daemon has agreed to leave.",
        "the daemon (pid {pid}) leaves {within}",
        pid="int: its process id",
        seconds="number: the longest that its work in flight gets",
    ),
    "left": _event(
        "What `drain` and `stop` print last: the daemon is gone.", "the daemon has left", pid="int: its process id"
    ),
    "status": _event(
        "What `status` prints: the daemon's answer over its control socket.",
        peer_id="text: its peer id",
        name="text: its name for people",
        version="text: its software version",
        pid="int: its process id",
        uptime_s="number: seconds since it started",
        network_id="text: the network it is in",
        addrs="list: multiaddrs under which others reach it",
        reachability="text: public, relay, local network only, this machine only or unknown",
        num_peers="int: live nodes it sees, itself included",
        state="text: starting, seeding, idle, training, serving, gateway, dashboard, draining, paused",
        training="object?: run, outer_step, num_outer_steps, loss, tokens_per_s, waits_for, waits_s, slow_links, "
        "convicted",
        serving="object?: model, start, end, num_sessions, tokens_per_s",
        memory_bytes="int: resident memory of the daemon and its libp2p child",
        pause="text: why it lends nothing now: hours, budget, or empty",
        lends_again_at="number?: when it lends again, in Unix seconds",
        month_bytes="int: sent and received in this month, where there is a monthly budget",
        month_budget_bytes="int: that budget, or 0",
        paths="object?: how many peers are connected, by path: direct, dialled back, punched, relayed",
        peers="list: of the 64 connected peers with the most bytes peer_id, name, path, rtt_ms (null: not measured), "
        "sent_bytes, received_bytes",
        relaying="object?: num_reservations, num_circuits, relayed_bytes, num_refused, throttled_s; null: no relay",
        limits="object?: max_upload_bytes_per_s and max_download_bytes_per_s (0: no limit), upload_bytes_per_s and "
        "download_bytes_per_s (used over the last seconds), hours (such as 22:00-07:00; empty: always)",
        spot_checks="object?: num_passed, num_failed, num_disputed, num_unchecked spans since the start, barred (peer "
        "ids of servers that were proved to have lied); null: no gateway",
    ),
    "overview": _event(
        "What `top` prints: the swarm at a glance.", overview="object: what a dashboard answers at /api/v1/overview"
    ),
    "finding": _event(
        "What `doctor` found in one check.",
        check="text: what was checked",
        result="text: ok, warn or fail",
        message="text: what was found",
        remedy="text: what to do about it, empty if ok",
    ),
    "plan": _event(
        "What `plan` found out.",
        model="text: the model's name",
        num_blocks="int: blocks that it has",
        nodes="list: for each node name, start, end (null: it takes nothing), kv_tokens, reason",
        lacking="list: for each span without a server start, end and the memory_bytes that would close it",
        tokens_per_s="number: what the slowest block does, all requests together without batching; 0 with gaps",
        chain="list: for each hop of the first request name, start, end, ms a token; empty with gaps",
        chain_ms="number?: milliseconds of one token of one request",
    ),
    "simulation": _event(
        "What `simulate` found out.",
        html="text: the report for people",
        json="text: the report for programs",
        sections="object: the report's figures by section",
    ),
    "model_check": _event(
        "What `models check` found out about a model that can be served; `error` says why one cannot.",
        model="text: the model's name",
        family="text: its family, as transformers calls it",
        num_blocks="int: blocks that it has",
        untried="text: why its blocks are only tried out when they are loaded; empty: they were tried",
    ),
    "proof_failed": _event(
        "A server of a published model was asked to prove that it holds the model's files, and failed: it is not used.",
        "{peer_id} does not hold {model} as it was published and is not used any more: {reason}",
        peer_id="text: the server",
        model="text: the model's name",
        reason="text: what was wrong",
        answer="text: what it sent, in hex, with its signature; empty: nothing",
    ),
    "published": _event(
        "`models publish` has signed a model's manifest.",
        "{model} is published by {publisher}: manifest {digest:.12} in {path}",
        model="text: the model's name",
        publisher="text: peer id of the key that signed",
        digest="text: digest of the manifest",
        path="text: the manifest's file",
    ),
    "verified": _event(
        "`models verify` has found that every file of a directory is the one in a manifest; `error` names another.",
        "{path} is {model} as {publisher} published it (manifest {digest:.12}): {num_files} files checked",
        model="text: the model's name",
        publisher="text: peer id of the publisher",
        digest="text: digest of the manifest",
        path="text: the directory",
        files="list: the files' names",
    ),
    "models": _event(
        "What `models` prints.",
        models="list: for each name, revision, num_blocks, served and missing (spans of blocks), num_servers, "
        "context_tokens (null: not known), publisher, manifest (digest) and dtype (null: not published), standing "
        "(pinned, remembered, new or unpublished), and others: revision to num_servers of other weights under the name",
    ),
    "chat_answer": _event(
        "What a model answered in `chat`.",
        model="text: the model's name, as it was asked for",
        text="text: the answer",
        finish_reason="text?: stop, or length where it was cut; null where Ctrl-C stopped it",
    ),
    "identity": _event(
        "What `identity` prints.",
        peer_id="text: the peer id",
        path="text: where the private key is",
        created="bool: whether it was created just now",
    ),
    "stage": _event(
        "The demo begins its next stage.",
        number="int: which stage, from 1",
        of="int: how many there are",
        title="text: what it is about",
    ),
    "progress": _event(
        "In the demo all volunteers have committed an outer step.",
        outer_step="int: the outer step",
        of="int: the run's last one",
        loss="number?: mean training loss of the interval that led to it",
        tokens_per_s="number: training speed of all volunteers together",
        bytes_per_param="number: mean bytes that one member sends for one outer step, by parameter",
        digests_equal="bool: whether all replicas held equal states after each outer step so far",
    ),
    "token": _event("A piece of the demo's completion.", text="text: the piece"),
    "killed": _event(
        "The demo has killed a node that serves, in the middle of an answer.",
        name="text: the node's name",
        peer_id="text: its peer id",
    ),
    "summary": _event(
        "How the demo ended. Always its last event.",
        nodes="int: volunteers",
        outer_steps="int: outer steps that were trained",
        parameters="int: parameters of the model",
        loss_first="number: validation loss before the first outer step",
        loss_last="number: validation loss after the last one",
        digests_equal="bool: whether all replicas held equal states after each outer step",
        digest="text: digest of the last state",
        bytes_per_param_per_step="number: mean bytes that one member sent for one outer step, by parameter",
        tokens_per_s="number: training speed of all volunteers together, waiting included",
        failover_ms="number: longest time between two tokens once a node was killed, as the client saw it",
        killed="text: the name of the node that was killed",
        tokens="int: tokens of the completion",
        tokens_identical="bool: whether one undisturbed process says the same",
        prompt="text: what was to be completed",
        completion="text: the completion, without the prompt",
        seconds="number: how long all of it took",
        checkpoint="text: the trained model, a Hugging Face directory; gone unless --keep was given",
    ),
}
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
