"""The events of commands that end by themselves, by name. `emitter` combines them with those of daemons."""

from __future__ import annotations

from collections.abc import Mapping

from swarm_node.events.event_spec import EventSpec, event_spec, run_event

COMMAND_EVENTS: Mapping[str, EventSpec] = {
    "run_written": event_spec(
        "The output of `run init`: it wrote a new run file.", "wrote {path}: edit it", path="text: the run file"
    ),
    "evidence": event_spec(
        "The output of `evidence verify` and `evidence list` for evidence against a member of a run, verified offline.",
        "{peer_id} lied: {reason} of {run}; it is banned {how_long} ({path})",
        path="text: the file",
        run="text: the run's id",
        peer_id="text: the peer that lied",
        kind="text: the kind of evidence, such as wrong_reduction",
        step="int: the outer step of the lie",
        reason="text: what it did",
        until="int?: the last outer step of the ban; null: the ban is permanent",
        how_long="text: the same in words",
    ),
    "served_evidence": event_spec(
        "The output of `evidence verify` and `evidence list` for evidence about a server's answer.",
        "{peer_id} {reason} ({model}, blocks {start}:{end}; {path})",
        path="text: the file",
        peer_id="text: the server",
        model="text: the model that the server served",
        start="int: first block of the server's span",
        end="int: one past the span's last block",
        is_proven="bool: whether the answer was recomputed and found wrong; false: nothing was recomputed",
        reason="text: what was found",
    ),
    "convicted_server": event_spec(
        "The output of `evidence verify` and `evidence list` for evidence that convicts a server of a wrong proof of "
        "possession, verified offline.",
        "{peer_id} lied: it {reason}; it is not used until {until_day} ({path})",
        path="text: the file",
        peer_id="text: the server",
        model="text: the model whose files it did not have",
        reason="text: what it did",
        until="number: when the ban ends, in Unix seconds; until then nodes that have the evidence do not use the "
        "server",
        until_day="text: the same as a date in UTC",
    ),
    "run_problem": event_spec(
        "An invalid setting that `run sign` found in a run file; an `error` follows.",
        "  {problem}",
        problem="text: the setting, its value, and what to use instead",
    ),
    "run": event_spec(
        "The output of `run sign` and `run show`: what a run file describes, and what the run costs.",
        path="text: the file",
        run="text?: the run's id; null without a valid signature",
        name="text: the run's name",
        signed_by="text?: peer id of the author; null without a valid signature",
        issued_at="int?: when it was signed, in Unix seconds",
        problem="text: why the signature is invalid; empty if it is valid",
        parameters="int: parameters of the model",
        outer_steps="int: outer steps of the run",
        interval_steps="int: inner steps between two outer steps",
        data="text: the training data",
        data_digest="text: digest that the data must have; empty: any data is accepted",
        data_revision="text: commit of a data set on the hub; empty: the newest commit, or the data is not on the hub",
        start="text: the checkpoint that the run starts from; empty: random weights from its seed",
        start_digest="text: digest that the checkpoint must have; empty: any",
        genesis="text: digest that the run's first state must have; empty: any",
        member_tokens="int: tokens that a member trains on in one outer step",
        group_tokens="list: tokens of one outer step, for the smallest and the largest round, followers included",
        member_bytes="int: bytes that a member of a large group sends in one outer step",
        memory_bytes="int: bytes of memory that a member on a CPU needs, without activations",
    ),
    "watching": run_event(
        "The first output of `run watch`: it joined the network and looks for the run.",
        "watching {run}: {outer_steps:outer step}, signed by {signed_by}",
        signed_by="text: peer id of the run's author",
        outer_steps="int: outer steps of the run",
    ),
    "committed": run_event(
        "The watched run committed an outer step; `run watch` verified the members' certificate.",
        "step {step}/{of}: loss {loss:.3f}, {num_trainers:trainer}, {tokens_per_s:.0f} tokens/s in all, "
        "state {digest:.12}",
        step="int: the outer step",
        of="int: total outer steps of the run",
        loss="number?: mean training loss of the group, weighted by tokens",
        digest="text: digest of the committed state",
        group="list: peer ids of the round's members",
        num_trainers="int: the members, and the trainers of clusters whose work they contributed",
        num_tokens="int: tokens that these trainers trained on",
        tokens_per_s="number: total training speed, as the members report it",
        on_probation="list: peer ids of the group's members on probation",
        num_on_probation="int: these members, and the trainers on probation whose work members contributed",
    ),
    "members": run_event(
        "The members that train the watched run; emitted when members or their states change.",
        "members: {summary}",
        members="list: for each peer_id, state (joining, training, finished), outer_step, tokens_per_s, loss",
        summary="text: number of members in each state",
    ),
    "resume_planned": run_event(
        "The members that `run resume` found, and the order that it would sign.",
        "the order: {run} continues from outer step {outer_step}, state {digest:.12}, with {num_roster:member}; "
        "left out: {left_out_names}",
        outer_step="int: the outer step to continue from",
        digest="text: digest of that state",
        roster="list: peer ids of the members that would vote from then on",
        left_out="list: peer ids of the members that would be left out",
        left_out_names="text: the last characters of these peer ids",
    ),
    "resume_not_signed": run_event(
        "`run resume` was run without --yes.",
        "nothing was signed. The order discards all work of the members left out since that step: make sure that "
        "they are gone, then run the command again with --yes",
    ),
    "resume_not_needed": run_event(
        "`run resume` was run without --yes, and enough members answered for the run to continue without an order.",
        "nothing was signed, because {run} can continue without an order: it is at outer step {outer_step}, and "
        "{num_answered} of its {num_members:member} answered. To sign the order anyway, add --yes",
        outer_step="int: the run's newest outer step",
        members="list: peer ids of that step's members",
        answered="list: peer ids of the members that answered",
    ),
    "resume_delivered": run_event(
        "Members accepted the resume order, and pass it on.",
        "the order is with {num_peers:member}: the run continues from outer step {outer_step}",
        outer_step="int: the outer step that the run continues from",
        peers="list: peer ids of the members that accepted it",
    ),
    "endorsement_planned": run_event(
        "The state that `run endorse` found, and would endorse.",
        "{run} is at outer step {outer_step}, state {digest:.12}, of the members {roster_names}; {basis}",
        outer_step="int: the outer step of the state",
        digest="text: digest of that state",
        roster="list: peer ids of the members of that state",
        roster_names="text: the last characters of these peer ids",
        holders="list: peer ids of the members that report this state",
        after="int?: the outer step of the previous endorsement; null: none",
        basis="text: why this state is considered the run's, in words",
    ),
    "endorsement_not_signed": run_event(
        "`run endorse` was run without --yes.",
        "nothing was signed. After an endorsement, newcomers accept only states that follow from the endorsed one: "
        "make sure that these are the run's members, then run the command again with --yes",
    ),
    "endorsement_delivered": run_event(
        "Members accepted the endorsement, and pass it on.",
        "the endorsement of outer step {outer_step} is with {num_peers:member}",
        outer_step="int: the outer step that was endorsed",
        peers="list: peer ids of the members that accepted it",
    ),
    "run_waits": run_event(
        "The watched run cannot commit a step because too few of its members are present. Emitted again when this "
        "changes, after a minute, and each time that the wait has doubled.",
        "waits: {reason} (for {seconds:.0f} s)",
        reason="text: how many members are present, how many a step needs, and which of the last step's members are "
        "missing",
        ready="int: members that are ready for a step, newcomers included",
        needed="int: minimum members that a step needs, newcomers included",
        missing="list: peer ids of the last step's members that are not ready",
        seconds="number: duration of the wait so far",
        remedy="text: how to continue the run if the missing members never return; empty while others are joining",
    ),
    "run_left": run_event(
        "The watched run's members reported that it is finished, but left before `run watch` received the proof.",
        "the members of run {run} reported that it is finished, but left before they proved it: {outer_step} outer "
        "steps, loss {loss:.3f}, state {digest:.12} (verified up to step {checked})",
        outer_step="int: the last outer step",
        digest="text: digest of the final state, as a member reported it",
        loss="number?: that member's training loss in its last interval",
        checked="int: the last outer step whose certificate was verified; 0: none",
    ),
    "leaving": event_spec(
        "The first output of `drain` and `stop`: the daemon has accepted the request to leave.",
        "the daemon (pid {pid}) leaves {within}",
        pid="int: its process id",
        seconds="number: the longest time that its work in flight gets",
    ),
    "left": event_spec(
        "The last output of `drain` and `stop`: the daemon is gone.", "the daemon has left", pid="int: its process id"
    ),
    "status": event_spec(
        "The output of `status`: the daemon's answer over its control socket.",
        peer_id="text: its peer id",
        name="text: its display name",
        version="text: its software version",
        protocol_version="int: its protocol version; 0: it does not say",
        pid="int: its process id",
        uptime_s="number: seconds since its start",
        network_id="text: the network it is in",
        addrs="list: multiaddrs at which others reach it",
        reachability="text: public, relay, local network only, this machine only or unknown",
        num_peers="int: live nodes known to it, itself included",
        state="text: starting, seeding, idle, training, serving, gateway, dashboard, draining, paused",
        training="object?: run, outer_step, num_outer_steps, loss, tokens_per_s, waits_for, waits_s, slow_links, "
        "convicted, steps_left (of its probation; 0: none), probation_steps, endorsed_step (0: none known), "
        "endorses_other, entered (the invitation or the vouches), held_out (scores on held-out data, in words), "
        "other_history (who shows one that this node does not follow, in words)",
        serving="object?: model, start, end, num_sessions, tokens_per_s",
        memory_bytes="int: resident memory of the daemon and its libp2p child",
        pause="text: why it is paused: hours or budget; empty: it is not paused",
        lends_again_at="number?: when it resumes work, in Unix seconds",
        month_bytes="int: bytes sent and received in this month, if there is a monthly budget",
        month_budget_bytes="int: the monthly budget; 0: none",
        paths="object?: number of connected peers by path: direct, dialled back, punched, relayed",
        peers="list: for the 64 connected peers with the most traffic: peer_id, name, path, rtt_ms (null: not "
        "measured), sent_bytes, received_bytes",
        relaying="object?: num_reservations, num_circuits, relayed_bytes, num_refused, throttled_s; null: it does "
        "not relay",
        limits="object?: max_upload_bytes_per_s and max_download_bytes_per_s (0: no limit), upload_bytes_per_s and "
        "download_bytes_per_s (measured over the last seconds), hours (such as 22:00-07:00; empty: always)",
        spot_checks="object?: num_passed, num_failed, num_disputed and num_unchecked (spans since the start), barred "
        "(peer ids of servers proved to have lied); null: it is not a gateway",
        convicted_servers="list: one line of text for each of the newest convicted servers, at most 8",
        not_joined="text: why a node that is being started has not joined its network yet",
    ),
    "overview": event_spec(
        "The output of `top --once --json`: an overview of the network.",
        overview="object: the response of a dashboard's /api/v1/overview",
    ),
    "finding": event_spec(
        "The result of one check of `doctor`.",
        check="text: name of the check",
        result="text: ok, warn or fail",
        message="text: what was found",
        remedy="text: what to do about it; empty if ok",
    ),
    "plan": event_spec(
        "The output of `plan`.",
        model="text: the model's name",
        num_blocks="int: blocks of the model",
        nodes="list: for each node: name, start, end (null: it serves nothing), kv_tokens, reason",
        lacking="list: for each span without a server: start, end and the memory_bytes needed to serve it",
        tokens_per_s="number: throughput of the slowest block over all requests, without batching; 0 if blocks are "
        "missing",
        chain="list: for each hop of the first request: name, start, end, ms per token; empty if blocks are missing",
        chain_ms="number?: milliseconds per token of one request",
    ),
    "simulation": event_spec(
        "The output of `simulate`.",
        html="text: the HTML report",
        json="text: the JSON report",
        sections="object: the report's figures by section",
    ),
    "model_check": event_spec(
        "The output of `models check` for a model that can be served; `error` says why a model cannot.",
        model="text: the model's name",
        family="text: its family, as transformers calls it",
        num_blocks="int: blocks of the model",
        untried="text: why its blocks can only be tested when they are loaded; empty: they were tested",
        lacks="text: what its directory lacks, weights or tokenizer; empty: neither, or it is on a hub",
    ),
    "proof_failed": event_spec(
        "A server of a published model sent a wrong proof of possession of the model's files; it is not used any more.",
        "{peer_id} does not hold {model} as it was published and is not used any more: {reason}",
        peer_id="text: the server",
        model="text: the model's name",
        reason="text: what is wrong with the proof",
        answer="text: its signed answer, in hex",
    ),
    "published": event_spec(
        "`models publish` signed a model's manifest, or found that the existing manifest has the same content.",
        "{model} {how} by {publisher}: manifest {digest:.12} in {path}",
        model="text: the model's name",
        publisher="text: peer id of the key that signed",
        digest="text: digest of the manifest",
        path="text: the manifest's file",
        is_kept="bool: whether an existing manifest was kept; the model's revision is then unchanged",
        how="text: whether it existed already, or replaces a manifest with another name, in words",
    ),
    "verified": event_spec(
        "`models verify` found that every file of a directory matches a manifest; `error` names a file that does not.",
        "{path} is {model} as {publisher} published it (manifest {digest:.12}): {num_files:file} checked",
        model="text: the model's name",
        publisher="text: peer id of the publisher",
        digest="text: digest of the manifest",
        path="text: the directory",
        files="list: the files' names",
    ),
    "models": event_spec(
        "The output of `models list`.",
        models="list: for each model: name, revision, num_blocks, served and missing (spans of blocks), num_servers, "
        "context_tokens (null: not known), publisher, manifest (digest) and dtype (null: not published), standing "
        "(pinned, remembered, new or unpublished), and others (num_servers of each other revision with this name)",
    ),
    "chat_answer": event_spec(
        "A model's answer in `chat`.",
        model="text: the model's name, as it was given",
        text="text: the answer",
        finish_reason="text?: stop, or length if the answer was cut off; null if Ctrl-C stopped it",
    ),
    "identity": event_spec(
        "The output of `identity`.",
        peer_id="text: the peer id",
        path="text: the file of the private key",
        created="bool: whether this command created it",
    ),
    "stage": event_spec(
        "The demo starts its next stage.",
        number="int: number of the stage, from 1",
        of="int: total number of stages",
        title="text: title of the stage",
    ),
    "progress": event_spec(
        "All volunteers of the demo have committed an outer step.",
        outer_step="int: the outer step",
        of="int: total outer steps of the run",
        loss="number?: mean training loss of the interval that led to it",
        tokens_per_s="number: training speed of all volunteers together",
        bytes_per_param="number: mean bytes that one member sends in one outer step, per parameter",
        digests_equal="bool: whether all replicas held equal states after each outer step so far",
    ),
    "token": event_spec("A piece of the demo's completion.", text="text: the piece"),
    "killed": event_spec(
        "The demo killed a serving node in the middle of an answer.",
        name="text: the node's name",
        peer_id="text: its peer id",
    ),
    "summary": event_spec(
        "The demo's result. Always its last event.",
        nodes="int: number of volunteers",
        outer_steps="int: outer steps trained",
        parameters="int: parameters of the model",
        loss_first="number: validation loss before the first outer step",
        loss_last="number: validation loss after the last outer step",
        digests_equal="bool: whether all replicas held equal states after each outer step",
        digest="text: digest of the last state",
        bytes_per_param_per_step="number: mean bytes that one member sent in one outer step, per parameter",
        tokens_per_s="number: training speed of all volunteers together, waiting included",
        failover_ms="number: longest time between two tokens after the node was killed, as measured by the client",
        killed="text: the name of the node that was killed",
        tokens="int: tokens of the completion",
        tokens_identical="bool: whether a single undisturbed process generates the same tokens",
        prompt="text: the prompt",
        completion="text: the completion, without the prompt",
        seconds="number: total duration",
        checkpoint="text: the trained model, a Hugging Face directory; deleted unless --keep was given",
    ),
}
