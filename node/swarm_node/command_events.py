"""The events of commands that end by themselves: what they found, wrote or did. A part of `event_contract`."""

from __future__ import annotations

from collections.abc import Mapping

from swarm_node.event_spec import EventSpec

COMMAND_EVENTS: Mapping[str, EventSpec] = {
    "run_written": EventSpec(
        about="What `run init` prints: there is a new run file to edit.",
        fields={"path": "text: where it is"},
        text="{path} is there to edit; then: swarm-node run sign {path}",
    ),
    "run_problem": EventSpec(
        about="What `run sign` finds impossible in a run file; an `error` follows.",
        fields={"problem": "text: the setting, its value, and what to use instead"},
        text="  {problem}",
    ),
    "run": EventSpec(
        about="What `run sign` and `run show` print: what a run file describes and what it costs.",
        fields={
            "path": "text: the file",
            "run": "text?: the run's id; null without a signature that holds",
            "name": "text: the run's name",
            "signed_by": "text?: peer id of the author; null without a signature that holds",
            "issued_at": "int?: when it was signed, in Unix seconds",
            "problem": "text: why the signature does not hold; empty if it does",
            "parameters": "int: of the model",
            "outer_steps": "int: outer steps of the run",
            "interval_steps": "int: inner steps between two of them",
            "data": "text: what is trained on",
            "data_digest": "text: what pins the data; empty: any data will do",
            "data_revision": "text: the commit of a data set on the hub; empty: the newest one, or there is none",
            "start": "text: the checkpoint that it starts from; empty: weights drawn from its seed",
            "start_digest": "text: what pins the checkpoint; empty: nothing does",
            "member_tokens": "int: tokens that a member trains on for an outer step",
            "group_tokens": "list: the same for the smallest and for the largest group",
            "member_bytes": "int: bytes that a member of a large group sends for an outer step",
            "memory_bytes": "int: memory that a member on a CPU needs in bytes, activations left out",
        },
    ),
    "watching": EventSpec(
        about="What `run watch` prints first: it is on the network and looks for the run.",
        fields={
            "run": "text: the run's id",
            "signed_by": "text: peer id of the run's author",
            "outer_steps": "int: outer steps of the run",
        },
        text="watching {run}: {outer_steps} outer steps, signed by {signed_by}",
    ),
    "committed": EventSpec(
        about="The watched run has taken an outer step; the members' certificate was checked.",
        fields={
            "run": "text: the run's id",
            "step": "int: the outer step",
            "of": "int: the run's last one",
            "loss": "number?: mean training loss of the group, weighted by tokens",
            "digest": "text: digest of the committed state",
            "group": "list: peer ids of the round's members",
            "num_tokens": "int: tokens that the group trained on",
            "tokens_per_s": "number: what the members say they do, together",
        },
        text="step {step}/{of}: loss {loss:.3f}, {num_group} nodes, {tokens_per_s:.0f} tokens/s in all, "
        "state {digest:.12}",
    ),
    "members": EventSpec(
        about="Who trains the watched run, whenever members or their states have changed.",
        fields={
            "run": "text: the run's id",
            "members": "list: for each peer_id, state (joining, training, finished), outer_step, tokens_per_s, loss",
            "summary": "text: how many there are in each state",
        },
        text="members: {summary}",
    ),
    "resume_planned": EventSpec(
        about="What `run resume` found, and what it signs.",
        fields={
            "run": "text: the run's id",
            "outer_step": "int: the outer step to go on from",
            "digest": "text: digest of that state",
            "roster": "list: peer ids of those who would decide what follows",
            "left_out": "list: peer ids of the last members who would not",
            "left_out_names": "text: the ends of these",
        },
        text="{run} would go on from outer step {outer_step}, state {digest:.12}, with {num_roster} members; left out: "
        "{left_out_names}",
    ),
    "resume_not_signed": EventSpec(
        about="`run resume` was not told --yes.",
        fields={"run": "text: the run's id"},
        text="nothing was signed. Whatever the members left out have done since then is lost, so be sure that they are "
        "gone; then run it again with --yes",
    ),
    "resume_not_needed": EventSpec(
        about="`run resume` was not told --yes, and enough members answered for the run to go on by itself.",
        fields={
            "run": "text: the run's id",
            "outer_step": "int: its newest outer step",
            "members": "list: peer ids of that step's members",
            "answered": "list: peer ids of those among them that answered",
        },
        text="nothing was signed: {run} is alive at outer step {outer_step}, {num_answered} of its {num_members} "
        "members answered, and its next step needs no order. One is needed only when the run cannot go on; --yes signs "
        "it all the same",
    ),
    "resume_delivered": EventSpec(
        about="Members have the resume order, and pass it on.",
        fields={
            "run": "text: the run's id",
            "outer_step": "int: the outer step it goes on from",
            "peers": "list: peer ids of those who took it",
        },
        text="{num_peers} members have the order: the run goes on from outer step {outer_step}",
    ),
    "run_left": EventSpec(
        about="The watched run's members said that it is finished, and left before `run watch` could see the proof.",
        fields={
            "run": "text: the run's id",
            "outer_step": "int: the last outer step",
            "digest": "text: digest of the final state, as a member said it",
            "loss": "number?: that member's training loss in its last interval",
            "checked": "int: the last outer step whose certificate was checked; 0 for none",
        },
        text="its members said that run {run} is finished, and left before they could show it: {outer_step} outer "
        "steps, loss {loss:.3f}, state {digest:.12} (checked up to step {checked})",
    ),
    "leaving": EventSpec(
        about="What `drain` and `stop` print first: the daemon has agreed to leave.",
        fields={"pid": "int: its process id", "seconds": "number: the longest that its work in flight gets"},
        text="the daemon (pid {pid}) leaves within {seconds:.0f} s",
    ),
    "left": EventSpec(
        about="What `drain` and `stop` print last: the daemon is gone.",
        fields={"pid": "int: its process id"},
        text="it has left",
    ),
    "status": EventSpec(
        about="What `status` prints: the daemon's answer over its control socket.",
        fields={
            "peer_id": "text: its peer id",
            "name": "text: its name for people",
            "version": "text: its software version",
            "pid": "int: its process id",
            "uptime_s": "number: seconds since it started",
            "network_id": "text: the network it is in",
            "addrs": "list: multiaddrs under which others reach it",
            "reachability": "text: public, relay, local network only, this machine only or unknown",
            "num_peers": "int: live nodes it sees, itself included",
            "state": "text: starting, seeding, idle, training, serving, gateway, draining",
            "training": "object?: run, outer_step, num_outer_steps, loss, tokens_per_s",
            "serving": "object?: model, start, end, num_sessions, tokens_per_s",
            "memory_bytes": "int: resident memory of the daemon and its libp2p child",
        },
    ),
    "overview": EventSpec(
        about="What `top` prints: the swarm at a glance.",
        fields={"overview": "object: what a dashboard answers at /api/v1/overview"},
    ),
    "finding": EventSpec(
        about="What `doctor` found in one check.",
        fields={
            "check": "text: what was checked",
            "result": "text: ok, warn or fail",
            "message": "text: what was found",
            "remedy": "text: what to do about it, empty if ok",
        },
    ),
    "plan": EventSpec(
        about="What `plan` found out.",
        fields={
            "model": "text: the model's name",
            "num_blocks": "int: blocks that it has",
            "nodes": "list: for each node name, start, end (null: it takes nothing), kv_tokens, reason",
            "lacking": "list: for each span without a server start, end and the memory_bytes that would close it",
            "tokens_per_s": "number: what the slowest block does, all requests together without batching; 0 with gaps",
            "chain": "list: for each hop of the first request name, start, end, ms a token; empty with gaps",
            "chain_ms": "number?: milliseconds of one token of one request",
        },
    ),
    "model_check": EventSpec(
        about="What `models check` found out about a model that can be served; `error` says why one cannot.",
        fields={
            "model": "text: the model's name",
            "family": "text: its family, as transformers calls it",
            "num_blocks": "int: blocks that it has",
            "untried": "text: why its blocks are only tried out when they are loaded; empty: they were tried",
        },
    ),
    "models": EventSpec(
        about="What `models` prints.",
        fields={
            "models": "list: for each name, revision, num_blocks, served and missing (spans of blocks), num_servers, "
            "context_tokens (null: not known), and others: the same of other weights that are served under the name",
        },
    ),
    "chat_answer": EventSpec(
        about="What a model answered in `chat`.",
        fields={
            "model": "text: the model's name, as it was asked for",
            "text": "text: the answer",
            "finish_reason": "text?: stop, or length where it was cut; null where Ctrl-C stopped it",
        },
    ),
    "identity": EventSpec(
        about="What `identity` prints.",
        fields={
            "peer_id": "text: the peer id",
            "path": "text: where the private key is",
            "created": "bool: whether it was created just now",
        },
    ),
    "stage": EventSpec(
        about="The demo begins its next stage.",
        fields={
            "number": "int: which stage, from 1",
            "of": "int: how many there are",
            "title": "text: what it is about",
        },
    ),
    "progress": EventSpec(
        about="In the demo all volunteers have committed an outer step.",
        fields={
            "outer_step": "int: the outer step",
            "of": "int: the run's last one",
            "loss": "number?: mean training loss of the interval that led to it",
            "tokens_per_s": "number: training speed of all volunteers together",
            "bytes_per_param": "number: mean bytes that one member sends for one outer step, by parameter",
            "digests_equal": "bool: whether all replicas held equal states after each outer step so far",
        },
    ),
    "token": EventSpec(about="A piece of the demo's completion.", fields={"text": "text: the piece"}),
    "killed": EventSpec(
        about="The demo has killed a node that serves, in the middle of an answer.",
        fields={"name": "text: the node's name", "peer_id": "text: its peer id"},
    ),
    "summary": EventSpec(
        about="How the demo ended. Always its last event.",
        fields={
            "nodes": "int: volunteers",
            "outer_steps": "int: outer steps that were trained",
            "parameters": "int: parameters of the model",
            "loss_first": "number: validation loss before the first outer step",
            "loss_last": "number: validation loss after the last one",
            "digests_equal": "bool: whether all replicas held equal states after each outer step",
            "digest": "text: digest of the last state",
            "bytes_per_param_per_step": "number: mean bytes that one member sent for one outer step, by parameter",
            "tokens_per_s": "number: training speed of all volunteers together, waiting included",
            "failover_ms": "number: longest time between two tokens once a node was killed, as the client saw it",
            "killed": "text: the name of the node that was killed",
            "tokens": "int: tokens of the completion",
            "tokens_identical": "bool: whether one undisturbed process says the same",
            "prompt": "text: what was to be completed",
            "completion": "text: the completion, without the prompt",
            "seconds": "number: how long all of it took",
            "checkpoint": "text: the trained model, a Hugging Face directory; gone unless --keep was given",
        },
    ),
}
