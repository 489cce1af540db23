"""The events of daemons, by name. `emitter` combines them with those of commands."""

from __future__ import annotations

from collections.abc import Mapping

from swarm_node.events.event_spec import EventSpec, event_spec, run_event

DAEMON_EVENTS: Mapping[str, EventSpec] = {
    "starting": event_spec(
        "The first event of `join` with work that needs torch: it loads torch and, at the first start, measures the "
        "machine. That can take half a minute on a busy machine.",
        "starting: loading torch and, at the first start, measuring this machine",
    ),
    "step": event_spec(
        "A numbered step of the startup is done.",
        "[{number}/{of}] {title}: {detail}",
        number="int: number of the step, from 1",
        of="int: total number of steps",
        title="text: what the step is about",
        detail="text: the step's result",
    ),
    "ready": event_spec(
        "The node is on the network.",
        "ready as {name} ({peer_id})",
        peer_id="text: this node's peer id",
        addrs="list: multiaddrs at which others reach it, each ending in /p2p/<peer_id>",
        name="text: the node's display name",
        network_id="text: the network it joined",
        home="text: its home directory",
    ),
    "invite": event_spec(
        "The command that joins another machine through this seed.",
        "others join with:\n\n  {command}\n{note}",
        command="text: a shell command, ready to paste",
        note="text: a line that says that the address holds only until the seed is started again; empty: it stays",
    ),
    "network_created": event_spec(
        "`invite --new-network` created a private network.",
        "this home owns the private network {network_id}\n"
        "  start its first node: swarm-node seed{option} --listen /ip4/0.0.0.0/tcp/4001\n"
        "  then invite others:   swarm-node invite{option}",
        network_id="text: the network's id, which contains its owner's public key",
        home="text: the home that holds the key",
        option="text: the `--home` option that further commands need, with a leading space; empty: none is needed",
    ),
    "invited": event_spec(
        "An invitation to a private network was signed. The event does not contain the invitation itself: that is "
        "written to stdout (with `--json`: to stderr), or to `file`.",
        "invitation {serial} until {until}, with the right to {rights_text}. Everyone who has it can join",
        serial="text: its serial, needed to revoke it",
        network_id="text: the network",
        rights="list: some of join, serve, train, ask",
        rights_text="text: the same as one line",
        expires_at="number: Unix seconds",
        until="text: the same in UTC",
        file="text: the file that the invitation was written to; empty: none",
    ),
    "run_invited": run_event(
        "An invitation to a training run was signed. The event does not contain the invitation itself: that is "
        "written to stdout (with `--json`: to stderr), or to `file`.",
        "invitation {serial} to {run} until {until}: {admits} can enter with it",
        serial="text: its serial",
        max_uses="int: maximum number of nodes that may use it",
        node="text: the only peer id that may use it; empty: any",
        admits="text: the nodes that may use it, in words",
        expires_at="number: Unix seconds",
        until="text: the same in UTC",
        file="text: the file that the invitation was written to; empty: none",
    ),
    "run_revoked": run_event(
        "The author of a run revoked an invitation or an inviter, and members accepted the revocation. It takes "
        "effect with one of the next outer steps.",
        "revoked in {run}: {what}; the order is with {num_peers:member}",
        what="text: what is revoked, in words",
        peers="list: peer ids of the members that accepted it",
    ),
    "vouched": run_event(
        "A member's vouch for a newcomer to a run was signed. The vouch is written to the same places as an "
        "invitation (see `run_invited`).",
        "{voucher} vouches for {node} in {run} until {until}; the run requires {needed} of these, from full members "
        "that have contributed to {credits:outer step}",
        node="text: peer id of the newcomer",
        voucher="text: peer id of the member that signed",
        needed="int: number of members that must vouch",
        credits="int: outer steps that each of them must have contributed to",
        expires_at="number: Unix seconds",
        until="text: the same in UTC",
        file="text: the file that the invitation was written to; empty: none",
    ),
    "entered": run_event(
        "The run's state says that this node entered the run by an invitation or by vouches.",
        "entered {run}: {how}",
        step="int: the outer step with which it entered",
        how="text: the invitation, or the members that vouched",
    ),
    "invitations": event_spec(
        "The output of `invite list --json`: the invitations that were signed with this home.",
        network_id="text: the network",
        invitations="list: objects with serial, rights, issued_at, expires_at, node, note and state",
    ),
    "revoked": event_spec(
        "An invitation to a private network was revoked.",
        "invitation {serial} is revoked",
        serial="text: its serial",
        told="bool: whether a member received the revocation and passes it on; otherwise the next node started with "
        "this home does",
    ),
    "waiting": event_spec(
        "A node with neither `--run` nor `--model` found no work that it can do, and keeps looking.",
        "waiting for work: {reason}",
        reason="text: the work that exists, and why this node cannot do it",
    ),
    "loading": event_spec(
        "The node chooses blocks of a model and loads their weights.",
        "finding and loading blocks of {model}",
        model="text: the model's name",
    ),
    "downloading": event_spec(
        "Progress of a download of weights from a hub; emitted at the start, periodically, and at the end.",
        "downloading {model}: {bar}",
        live=True,
        model="text: the model's name",
        num_bytes="int: bytes downloaded so far",
        total_bytes="int: total bytes",
    ),
    "manifest": event_spec(
        "The model that this node serves has a manifest of its files, signed by its publisher.",
        "{model} is published by {publisher} (manifest {digest:.12}); files that differ from it are refused",
        model="text: the model's name",
        publisher="text: the publisher's peer id",
        digest="text: digest of the manifest",
    ),
    "hashing": event_spec(
        "Progress of computing the digests of a model's weights; emitted at the start, periodically, and at the end.",
        "hashing {model}: {bar}",
        live=True,
        model="text: the model's name",
        num_bytes="int: bytes read so far",
        total_bytes="int: total bytes of the weights",
    ),
    "serving": event_spec(
        "This node serves the blocks `[start, end)` of a model.",
        "serving blocks {start}:{end} of {model}: {reason}",
        model="text: the model's name",
        start="int: the span's first block",
        end="int: one past the span's last block",
        revision="text: digest of the checkpoint; a chain never mixes revisions",
        reason="text: why it chose these blocks",
    ),
    "tokenizing": run_event(
        "Progress of tokenizing the run's data, which is cached for the next start; emitted periodically and at the "
        "end.",
        "tokenizing: {share:.0%} read, {num_tokens:token}, {tokens_per_s:.0f} tokens/s",
        live=True,
        share="number: share of the data read so far, from 0 to 1",
        num_tokens="int: tokens so far",
        tokens_per_s="number: tokens per second",
        folder="text: the cache directory, shared by all homes of this user",
    ),
    "training": run_event(
        "This node has the run's state and takes part from the next interval on.",
        "training {run} from outer step {outer_step}",
        outer_step="int: the committed outer step it starts from",
        is_alone="bool: whether it found no other member, so that nobody could show it a later state",
    ),
    "state_fetched": run_event(
        "This node has the run's committed state, and has verified each of its chunks.",
        "state of step {step} ready, {num_bytes} bytes from {num_donors:peer} in {seconds:.1f} s",
        step="int: the outer step of the state",
        digest="text: digest of the state",
        donors="list: peer ids that sent chunks; empty if nothing had to be fetched",
        num_bytes="int: bytes fetched",
        seconds="number: duration",
    ),
    "interval": run_event(
        "This node finished its inner steps of one interval.",
        step="int: the outer step that the interval leads to",
        num_tokens="int: tokens trained on",
        loss="number?: this node's mean training loss over the interval",
        seconds="number: duration of the inner steps",
        tokens_per_s="number: training speed of this node",
    ),
    "outer_step": run_event(
        "A round committed an outer step. All replicas that report this step have this digest.",
        "step {step}: loss {loss:.3f}{here}, {num_trainers:trainer}, {seconds:.1f} s",
        step="int: the outer step that was committed",
        fragment="int: the fragment of the model that it updated, from 0",
        loss="number?: mean training loss of the group, weighted by tokens",
        digest="text: digest of the committed state",
        group="list: peer ids of the round's members",
        num_trainers="int: the members, and the trainers of clusters whose work they contributed",
        num_tokens="int: tokens that these trainers trained on",
        bytes_sent="int: bytes this node sent for the step",
        seconds="number: time since the previous step",
        round_s="number: the part of `seconds` after the end of this node's interval",
        tokens_per_s="number: training speed of this node in its interval",
    ),
    "validated": run_event(
        "The committed parameters were validated on held-out data: by this node, or, in `run watch`, by the members "
        "(the median of their losses).",
        "step {step}: validation loss {loss:.3f}",
        step="int: the outer step of the parameters",
        loss="number?: the mean loss",
    ),
    "slow_link": run_event(
        "In the last rounds a member, or a link between two members, was slower than the others.",
        "{words}",
        kind="text: sender, receiver or link",
        sender="text: peer id of the sender, empty for a receiver",
        receiver="text: peer id of the receiver, empty for a sender",
        slowdown="number: its transfer time divided by the usual transfer time",
        words="text: the same in words",
    ),
    "round_aborted": run_event(
        "An attempt at an outer step failed. The committed state is unchanged and the interval's work is kept.",
        "step {step}, attempt {attempt} failed: {reason}",
        repeated_field="reason",
        step="int: the outer step that was attempted",
        attempt="int: number of the attempt, from 0",
        reason="text: what went wrong",
        missing="list: known peer ids that did not answer or were at fault",
    ),
    "member_convicted": run_event(
        "Evidence that this node verified proves that a member of the run lied. This node excludes the member from "
        "its rounds for the run's `ban_steps`.",
        "convicted in step {step}, banned {how_long}: {peer_id}, {reason}",
        step="int: the outer step of the lie",
        peer_id="text: the peer that lied",
        kind="text: the kind of evidence, such as wrong_reduction",
        reason="text: what it did",
        until="int?: the last outer step of the ban; null: the ban is permanent",
        how_long="text: the same in words",
    ),
    "server_convicted": event_spec(
        "Evidence that this node verified proves that a server of a published model signed a wrong proof. This node "
        "does not use the server, and passes the evidence on.",
        "{peer_id} is convicted and not used until {until_day}: it {reason}",
        peer_id="text: the server",
        model="text: the model whose files it did not have",
        reason="text: what it did",
        until="number: when the ban ends, in Unix seconds",
        until_day="text: the same as a date in UTC",
    ),
    "interval_validated": run_event(
        "This node recomputed another member's interval, because the run's `validation_rate` selected it or because "
        "others accused the member. This node contributes nothing to that step.",
        "the interval of {peer_id} for step {step} was recomputed: {tier}, distance {distance:.3g}",
        step="int: the outer step that the interval was for",
        peer_id="text: the peer whose interval was recomputed",
        tier="text: exact (equal bytes), close (within the run's validation_tolerance) or wrong",
        distance="number: the norm of the difference, relative to that of the recomputed values; at most 1e6",
    ),
    "falsely_accused": run_event(
        "A member accused another of a contribution that it did not train. This node recomputed the interval and "
        "found the contribution correct. It ignores further accusations by that accuser; nobody is banned.",
        "{accuser} falsely accused {peer_id} in step {step}",
        step="int: the outer step that the interval was for",
        peer_id="text: the accused peer",
        accuser="text: the accusing peer",
    ),
    "contribution_late": run_event(
        "An outer step was committed without this node's contribution. The work is lost and its samples are leased "
        "again. The next interval starts from the new state.",
        "step {step}: this node's contribution {when}: its work is lost, and its samples are leased again",
        step="int: the outer step",
        num_tokens="int: tokens trained on; 0 if the interval was still running",
        late_s="number?: seconds after the round's group was formed, by the clocks of two machines; null: the "
        "interval was still running",
        when="text: the same in words",
    ),
    "run_resumed": run_event(
        "The run continues without some of its members, by a resume order of its author.",
        "by order of the run's author, the run continues from step {step} with {num_roster:member}, without the others",
        step="int: the outer step that it continues from",
        digest="text: digest of that state",
        roster="list: peer ids of the members that vote from then on",
        sequence="int: the order's number; later orders have higher numbers",
    ),
    "on_probation": run_event(
        "This node joined a run that had already started and is on probation: its work has a lower weight. Also "
        "emitted when the probation ends.",
        "{words}",
        step="int: outer step of the state that contains this",
        steps_left="int: outer steps that it must still contribute to; 0: the probation is over",
        words="text: the same in words",
    ),
    "held_out_scored": run_event(
        "The held-out scores of the trainers: moving averages, as measured by other members, of the improvement that "
        "a trainer's contributions make to the loss on held-out data. They are part of the committed state.",
        step="int: outer step of the state that contains this",
        scores="object: nats per outer step, by peer id; positive values are improvements",
        own="number?: this node's score; null: none yet",
    ),
    "state_endorsed": run_event(
        "The run's author endorsed a state, from which newcomers start. If this node has a different state at that "
        "step, it is not following the author's run.",
        "the run's author endorses step {step}, state {digest:.12}: newcomers start from it",
        step="int: the outer step of the endorsed state",
        digest="text: digest of that state",
        sequence="int: the endorsement's number; later endorsements have higher numbers",
        is_other="bool: whether this node has a different state at that step",
    ),
    "checkpoint": run_event(
        "A checkpoint of the committed state was written to disk.",
        outer_step="int: the outer step of the state",
        path="text: the directory",
    ),
    "run_finished": run_event(
        "The run's last outer step is committed.",
        "run {run} finished after {outer_step:outer step}",
        outer_step="int: the last outer step",
        digest="text: digest of the final state",
    ),
    "exported": run_event(
        "A run's result, or the state that `run export` was asked for, was written as a Hugging Face model directory.",
        "model of outer step {outer_step} written to {path}",
        path="text: the directory",
        outer_step="int: the outer step of the state",
        digest="text: digest of the state",
    ),
    "lingering": run_event(
        "This node has finished the run, but other members have not: it stays to send them the final state.",
        "waiting up to {seconds:.0f} s to send the last state to members that have not finished ({num_peers}; some "
        "may be gone); Ctrl-C leaves at once",
        peers="list: peer ids of these members; a dead peer is listed until its record expires",
        seconds="number: the longest time that it stays",
    ),
    "listening": event_spec(
        "The gateway accepts HTTP requests.",
        "OpenAI clients use {url}/v1",
        url="text: base URL; the OpenAI API is under /v1",
    ),
    "dashboard": event_spec(
        "The dashboard accepts HTTP requests, on its own or as part of a gateway.",
        "the network is shown at {url}/",
        url="text: base URL; the pages are at /, the JSON API is under /api/v1",
    ),
    "metrics": event_spec(
        "Prometheus metrics are served, because `--metrics` was given.",
        "Prometheus metrics are at {url}",
        url="text: the URL to scrape",
    ),
    "warning": event_spec(
        "A problem that does not stop the node.",
        "warning: {message}",
        repeated_field="message",
        message="text: what happened",
        remedy="text: what to do about it; may be empty",
    ),
    "error": event_spec(
        "The command failed and exits with a non-zero code. A daemon that had begun to start emits `stopped` after it.",
        message="text: what happened",
        remedy="text: what to do about it; may be empty",
    ),
    "clock_right": event_spec(
        "This machine's clock agrees with those of its peers again, after a warning that it did not.",
        "this machine's clock is right again: within {seconds:.0f} s of those of its peers",
        seconds="number: how far it is from the median of those that answered",
    ),
    "draining": event_spec(
        "The node takes no new work, finishes its work in flight, and leaves.",
        "draining ({reason}): leaving {within}",
        reason="text: what asked the node to leave",
        seconds="number: the longest time that the work in flight gets",
    ),
    "pausing": event_spec(
        "The node's `hours` are over, or its `monthly_traffic` is nearly used up: it takes no new work, and finishes "
        "its work in flight.",
        "{reason}; work in flight has {seconds:.0f} s to finish",
        reason="text: why, and when the node resumes work",
        seconds="number: the longest time that the work in flight gets",
    ),
    "paused": event_spec(
        "The node does no work at present. It stays in the network, and resumes by itself.",
        "paused: {reason}",
        reason="text: why, and when the node resumes work",
        until="number: when the node resumes work, in Unix seconds",
    ),
    "stopped": event_spec(
        "The node has left: it was told to, its work was done, or it failed. Always the last event of a daemon.",
        "stopped: {reason}",
        reason="text: why",
        clean="bool: whether all work in flight was finished",
    ),
}
