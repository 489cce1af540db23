"""The events of daemons, by name. `emitter` puts them together with those of commands."""

from __future__ import annotations

from collections.abc import Mapping

from swarm_node.events.event_spec import EventSpec, event_spec, run_event

DAEMON_EVENTS: Mapping[str, EventSpec] = {
    "step": event_spec(
        "One numbered step of starting up is done.",
        "[{number}/{of}] {title}: {detail}",
        number="int: which step, from 1",
        of="int: how many there are",
        title="text: what the step is about",
        detail="text: what came out of it",
    ),
    "ready": event_spec(
        "The node is on the network and answers `status`, `drain` and `stop`.",
        "ready as {name} ({peer_id})",
        peer_id="text: this node's peer id",
        addrs="list: multiaddrs under which others reach it, each ending in /p2p/<peer_id>",
        name="text: its name for people",
        network_id="text: the network it joined",
        home="text: its home directory",
    ),
    "invite": event_spec(
        "What to run on another machine to join through this seed.",
        "others join with:\n\n  {command}\n",
        command="text: a shell command, ready to paste",
    ),
    "network_created": event_spec(
        "`invite --new-network` made a private network.",
        "this home owns the private network {network_id}\n"
        "  start its first node: swarm-node seed{option} --listen /ip4/0.0.0.0/tcp/4001\n"
        "  then invite others:   swarm-node invite{option}",
        network_id="text: the network's id, which names its owner's key",
        home="text: the home that holds the key",
        option="text: how further commands are told that home, with a space before it; empty: they find it",
    ),
    "invited": event_spec(
        "An invitation to a private network was signed. Its text is in no event: it goes to stdout, or to stderr with "
        "`--json`, or to `file`.",
        "invitation {serial} until {until}, with the right to {rights_text}. Everyone who has it can join",
        serial="text: its serial, by which it is revoked",
        network_id="text: the network",
        rights="list: some of join, serve, train, ask",
        rights_text="text: the same as one line",
        expires_at="number: Unix seconds",
        until="text: the same in UTC",
        file="text: the file that holds it; empty: none",
    ),
    "run_invited": run_event(
        "An invitation to a training run was signed. Its text is in no event: it goes to stdout, or to stderr with "
        "`--json`, or to `file`.",
        "invitation {serial} to {run} until {until}: {admits} can enter with it",
        serial="text: its serial",
        max_uses="int: how many nodes may enter with it",
        node="text: the peer id that it is bound to; empty: none",
        admits="text: the nodes that can enter with it, in words",
        expires_at="number: Unix seconds",
        until="text: the same in UTC",
        file="text: the file that holds it; empty: none",
    ),
    "run_revoked": run_event(
        "The author of a run has revoked an invitation or an inviter, and members have taken the revocation. The run's "
        "state learns it with one of the next steps.",
        "revoked in {run}: {what}; the order is with {num_peers:member}",
        what="text: what is revoked, in words",
        peers="list: peer ids of the members that took it",
    ),
    "vouched": run_event(
        "A member's vouch for a newcomer to a run was signed. It goes where an invitation goes (see `run_invited`).",
        "{voucher} vouches for {node} in {run} until {until}; the run wants {needed} such, of members that count fully "
        "and have contributed to {credits} outer steps",
        node="text: peer id of the newcomer",
        voucher="text: peer id of the member that signed",
        needed="int: how many members have to vouch",
        credits="int: outer steps to which each has to have contributed",
        expires_at="number: Unix seconds",
        until="text: the same in UTC",
        file="text: the file that holds it; empty: none",
    ),
    "entered": run_event(
        "This node is in the run by an invitation or by vouches, as the run's state says.",
        "entered {run}: {how}",
        step="int: the outer step with which it entered",
        how="text: by which invitation, or who vouched",
    ),
    "invitations": event_spec(
        "The invitations that a home has signed, for `invite list --json`.",
        network_id="text: the network",
        invitations="list: objects with serial, rights, issued_at, expires_at, node, note and state",
    ),
    "revoked": event_spec(
        "An invitation to a private network was revoked.",
        "invitation {serial} is revoked",
        serial="text: its serial",
        told="bool: whether a member was told, which passes it on; otherwise the next node of this home does",
    ),
    "waiting": event_spec(
        "A node that was given no work finds none that it can do; it takes what comes.",
        "waiting for work: {reason}",
        reason="text: what there is, and why it is not for this node",
    ),
    "loading": event_spec(
        "A model is looked at: which blocks of it to take, and then their weights.",
        "finding and loading blocks of {model}",
        model="text: the model's name",
    ),
    "downloading": event_spec(
        "Weights come from a hub: now and then, at the beginning and at the end.",
        "downloading {model}: {bar}",
        live=True,
        model="text: the model's name",
        num_bytes="int: bytes that are there",
        total_bytes="int: all that will be",
    ),
    "manifest": event_spec(
        "The model that this node serves is published: its publisher has signed a manifest of its files.",
        "{model} is published by {publisher} (manifest {digest:.12}); files that differ from it are refused",
        model="text: the model's name",
        publisher="text: the publisher's peer id",
        digest="text: digest of the manifest",
    ),
    "hashing": event_spec(
        "The weights of a model are read to compute their digests: now and then, at the beginning and at the end.",
        "hashing {model}: {bar}",
        live=True,
        model="text: the model's name",
        num_bytes="int: bytes that have been read",
        total_bytes="int: all bytes of the weights",
    ),
    "serving": event_spec(
        "This node answers for the span `[start, end)` of a model.",
        "serving blocks {start}:{end} of {model}: {reason}",
        model="text: the model's name",
        start="int: the span's first block",
        end="int: one past the span's last block",
        revision="text: digest of the checkpoint; servers of different revisions never mix",
        reason="text: why these blocks",
    ),
    "tokenizing": run_event(
        "The run's data becomes tokens, which are kept for the next start: now and then, and at the end.",
        "tokenizing: {share:.0%} read, {num_tokens:token}, {tokens_per_s:.0f} tokens/s",
        live=True,
        share="number: how much of the data has been read, from 0 to 1",
        num_tokens="int: tokens so far",
        tokens_per_s="number: how fast they come",
        folder="text: where they are kept, for every home of this user",
    ),
    "training": run_event(
        "This node holds the run's state and takes part from the next interval on.",
        "training {run} from outer step {outer_step}",
        outer_step="int: the committed outer step it starts from",
    ),
    "state_fetched": run_event(
        "This node has the run's committed state, every chunk of it checked.",
        "state of step {step} ready, {num_bytes} bytes from {num_donors:peer} in {seconds:.1f} s",
        step="int: the outer step of the state",
        digest="text: digest of the state",
        donors="list: peer ids of those who gave chunks; empty if nothing had to be fetched",
        num_bytes="int: bytes fetched",
        seconds="number: how long it took",
    ),
    "interval": run_event(
        "This node finished its inner steps of one interval.",
        step="int: the outer step that the interval leads to",
        num_tokens="int: tokens trained on",
        loss="number?: this node's mean training loss over the interval",
        seconds="number: how long the inner steps took",
        tokens_per_s="number: training speed of this node",
    ),
    "outer_step": run_event(
        "A round committed: the swarm took an outer step, and every replica that says so has this digest.",
        "step {step}: loss {loss:.3f}{here}, {num_trainers:trainer}, {seconds:.1f} s",
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
    "validated": run_event(
        "The committed parameters were tried on held-out data: by this node, or, in `run watch`, by the members, "
        "of whose losses it is the median.",
        "step {step}: validation loss {loss:.3f}",
        step="int: the outer step of the parameters",
        loss="number?: their mean loss",
    ),
    "slow_link": run_event(
        "In the last rounds a member or a link between two was slower, or lost more, than those of the other members.",
        "{words}",
        kind="text: sender, receiver or link",
        sender="text: peer id of the sender, empty for a receiver",
        receiver="text: peer id of the receiver, empty for a sender",
        slowdown="number: its transfer time divided by the usual one",
        words="text: the same in words",
    ),
    "round_aborted": run_event(
        "An attempt at an outer step failed. The committed state is untouched and the work is kept.",
        "step {step}, attempt {attempt} failed: {reason}",
        repeated_field="reason",
        step="int: the outer step that was attempted",
        attempt="int: which attempt, from 0",
        reason="text: what went wrong",
        missing="list: peer ids that did not answer or were at fault, as far as is known",
    ),
    "member_convicted": run_event(
        "Evidence that this node has checked proves that a member of the run lied. It takes part in no round with this "
        "node, for as long as the run's ban_steps say.",
        "convicted in step {step}, banned {how_long}: {peer_id}, {reason}",
        step="int: the outer step of the lie",
        peer_id="text: the peer that lied",
        kind="text: the kind of evidence, such as wrong_reduction",
        reason="text: what it did",
        until="int?: the last outer step of which it is kept out; null: it is banned for good",
        how_long="text: the same in words",
    ),
    "server_convicted": event_spec(
        "Evidence that this node has checked proves that a server of a published model signed a wrong proof. This node "
        "does not ask it, and passes the evidence on.",
        "{peer_id} is convicted and not asked until {until_day}: it {reason}",
        peer_id="text: the server",
        model="text: the model whose files it had not",
        reason="text: what it did",
        until="number: until when it is not asked, in Unix seconds",
        until_day="text: that day, in UTC",
    ),
    "interval_validated": run_event(
        "This node has computed another member's interval once more, as the run's validation_rate draws, or since "
        "others accuse it. In that step it contributes nothing.",
        "the interval of {peer_id} for step {step} was computed once more: {tier}, distance {distance:.3g}",
        step="int: the outer step that the interval was for",
        peer_id="text: the peer whose interval it is",
        tier="text: exact (equal bytes), close (within the run's validation_tolerance) or wrong",
        distance="number: the norm of the difference, relative to that of the recomputed values; at most 1e6",
    ),
    "falsely_accused": run_event(
        "A member accuses another one of not having trained what it sent, and this node, which computed the interval "
        "once more, finds that it did. It does not listen to that accuser any more; nobody is banned.",
        "{accuser} accuses {peer_id} in step {step} of what is not so",
        step="int: the outer step that the interval was for",
        peer_id="text: the accused peer",
        accuser="text: the peer that accuses it",
    ),
    "contribution_late": run_event(
        "An outer step was committed without what this node has trained for it: that work is lost, and its "
        "samples are leased again. The next interval begins from the new state.",
        "step {step}: this node's contribution {when}: its work is lost, and its samples are leased again",
        step="int: the outer step",
        num_tokens="int: what was trained on; 0 while it was still computed",
        late_s="number?: seconds after the round's group was formed, by two clocks; null: still computed",
        when="text: the same in words",
    ),
    "run_resumed": run_event(
        "The run goes on without some of its members, by a resume order of its author.",
        "by order of the run's author, the run continues from step {step} with {num_roster:member}, without the others",
        step="int: the outer step it goes on from",
        digest="text: digest of that state",
        roster="list: peer ids of those who decide what follows",
        sequence="int: the order's number; a later one is greater",
    ),
    "on_probation": run_event(
        "This node has joined an open run that was under way, and counts for less until it has contributed to more "
        "steps, or has just done so.",
        "{words}",
        step="int: the outer step of the state that says so",
        steps_left="int: the steps to which it still has to contribute; 0: it counts fully from now on",
        words="text: the same in words",
    ),
    "held_out_scored": run_event(
        "What trainers' contributions do to the loss on held-out data, as the others measure it: slow averages, which "
        "are part of the committed state.",
        step="int: the outer step of the state that says so",
        scores="object: nats a step, by peer id; above 0 is good",
        own="number?: this node's own score; null: it has none yet",
    ),
    "state_endorsed": run_event(
        "The run's author has endorsed a state of its history, from which newcomers begin. If this node's own history "
        "has another state there, it was joined to something that is not the run.",
        "the run's author endorses step {step}, state {digest:.12}: newcomers begin from there",
        step="int: the outer step it is of",
        digest="text: digest of that state",
        sequence="int: the endorsement's number; a later one is greater",
        is_other="bool: whether this node's history has another state of that step",
    ),
    "checkpoint": run_event(
        "A checkpoint of the committed state is safely on disk.",
        outer_step="int: the outer step it holds",
        path="text: where it is",
    ),
    "run_finished": run_event(
        "The run's last outer step is committed.",
        "run {run} finished after {outer_step} outer steps",
        outer_step="int: the last outer step",
        digest="text: digest of the final state",
    ),
    "exported": run_event(
        "A run's result, or the state that `run export` was asked for, is a Hugging Face directory.",
        "model of outer step {outer_step} written to {path}",
        path="text: the directory",
        outer_step="int: the outer step of the state",
        digest="text: digest of the state",
    ),
    "lingering": run_event(
        "The run is finished here, and others say that they are not: it stays to give them its state.",
        "waiting up to {seconds:.0f} s to give the last state to members that have not finished ({num_peers}, of which "
        "some may be gone); Ctrl-C leaves at once",
        peers="list: peer ids of the others; a peer that has died is among them until its record ends",
        seconds="number: how long it stays at most",
    ),
    "listening": event_spec(
        "The gateway answers HTTP.",
        "OpenAI clients use {url}/v1",
        url="text: base URL; OpenAI's API is below it under /v1",
    ),
    "dashboard": event_spec(
        "The dashboard answers HTTP, beside a gateway or alone.",
        "the network is shown at {url}/",
        url="text: its base URL; the pages are at /, the JSON API below /api/v1",
    ),
    "metrics": event_spec(
        "Prometheus is answered: `--metrics` was given.", "Prometheus metrics are at {url}", url="text: what to scrape"
    ),
    "warning": event_spec(
        "Something is wrong that the node can live with.",
        "warning: {message}",
        repeated_field="message",
        message="text: what happened",
        remedy="text: what to do about it, may be empty",
    ),
    "error": event_spec(
        "The command cannot go on; it exits non-zero. A daemon that had begun to start says `stopped` after it.",
        message="text: what happened",
        remedy="text: what to do about it, may be empty",
    ),
    "draining": event_spec(
        "The node takes nothing new, finishes what it has and leaves.",
        "draining ({reason}): leaving {within}",
        reason="text: by what the node was asked to leave",
        seconds="number: how long it waits before it stops anyway",
    ),
    "pausing": event_spec(
        "The hours in which the node lends are over, or its monthly traffic is nearly used up: it takes "
        "nothing new, and finishes what it has.",
        "{reason}; work in flight has {seconds:.0f} s to finish",
        reason="text: why, and when it lends again",
        seconds="number: how long it waits before it stops anyway",
    ),
    "paused": event_spec(
        "The node lends nothing for now, and stays in the network. It begins again by itself.",
        "paused: {reason}",
        reason="text: why, and when it lends again",
        until="number: when it lends again, in Unix seconds",
    ),
    "stopped": event_spec(
        "The node has left: it was told to, was done, or could not go on. Always the last event of a daemon.",
        "stopped: {reason}",
        reason="text: why",
        clean="bool: whether everything in flight was finished",
    ),
}
