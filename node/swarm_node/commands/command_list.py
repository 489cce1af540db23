"""Every sub-command of `swarm-node`: its purpose, code, settings and options. Values only."""

from __future__ import annotations

from swarm_node.commands.command_options import Command
from swarm_node.demo.command import INTERVAL_STEPS, MIN_NEW_TOKENS, NUM_NODES, OUTER_STEPS, TEMPERATURE

HERE = ("home",)
MEMBER = (*HERE, "peers", "network_id", "invite")
REACH = ("listen", "announce", "mdns")
PROCESS = ("relay_rate", "drain_s", "tethered", "metrics", "otlp", "log_format", "log_level")
LINK = ("max_upload", "max_download")
TASK = ("run", "invitation", "then_serve", "model", "manifest", "take")
SERVING = ("dtype", "blocks", "max_blocks", "max_memory")
WORK = (*TASK, *SERVING, "hours", "monthly_traffic", *LINK, "device", "threads", "probe")
HTTP = ("host", "port", "allowed_hosts", "trusted_proxies", "history", "checkpoints")
DATA = ("data", "tokenizer", "start")
TRAINING = (*DATA, "devices", "micro_batch", "autocast", "checkpoint_activations", "compile", "tensorboard")
CHECKPOINTS = ("keep_checkpoints", "keep_every")
AT_HOME = ("text_at_home", "blocks_at_home")
ADDR = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW…"

# options that several commands share
RUN = {"[PATH]": "The signed run file, or the run's id (default: run.toml)."}
RUN_FILE = {"[PATH]": "The signed run file (default: run.toml)."}
SIGNER = {"--identity FILE": "Sign with this key instead of the one in the home."}
EXPIRES = {"--expires TIME": "Validity, such as 30d, 12h or 90m; at most 366d (default: 30d)."}
NEW_FILE = {"--out FILE": "Write to a new file that only you can read, instead of stdout (with --json: stderr)."}
FOR_NODE = {"--for-node NODE": "Invite only this peer id. On that machine, swarm-node identity shows the id."}
COMMANDS = (
    Command(
        name="seed",
        purpose="Run a seed: a node through which others join, and which relays for nodes behind a NAT.",
        code="swarm_node.commands.daemons:seed",
        settings=(*MEMBER, "name", *REACH, *PROCESS),
        example="swarm-node seed --listen /ip4/0.0.0.0/tcp/4001",
        about={"peers": "Address of another seed or node, to join its network. Not needed to start a network."},
    ),
    Command(
        name="join",
        purpose="Join a network: train a run, serve a model, or do the work that the network needs most.",
        code="swarm_node.commands.daemons:join",
        settings=(*MEMBER, "name", *WORK, *TRAINING, *CHECKPOINTS, *REACH, "relay", *PROCESS),
        example=f"swarm-node join --peers {ADDR} --run story.toml --then-serve",
    ),
    Command(
        name="run init",
        purpose="Write a new run file to edit, with every setting, its meaning and its default.",
        code="swarm_node.commands.run:init",
        settings=HERE,
        example="swarm-node run init story.toml",
        options={
            "[PATH]": "The new run file (default: run.toml).",
            "--start START": "Start from this checkpoint: a Hugging Face model directory, or OWNER/NAME[@REVISION].",
        },
    ),
    Command(
        name="run sign",
        purpose="Check a run file, pin its data and checkpoint, and sign it, so that others can join the run.",
        code="swarm_node.commands.run:sign",
        settings=(*HERE, *DATA),
        example="swarm-node run sign story.toml",
        options={
            "[PATH]": "The run file (default: run.toml).",
            **SIGNER,
            "--pin": "Pin a hub data set by the digest of its tokens as well as its commit. This downloads and "
            "tokenizes the data set now.",
            "--unpinned": "Do not pin the data; members may then train on different data.",
        },
    ),
    Command(
        name="run show",
        purpose="Show what a run file describes, what the run costs, and whether its signature is valid.",
        code="swarm_node.commands.run:show",
        settings=(),
        example="swarm-node run show story.toml",
        options={"[PATH]": "The run file (default: run.toml)."},
    ),
    Command(
        name="run watch",
        purpose="Follow the outer steps and members of a run without training it.",
        code="swarm_node.commands.run_watch:watch",
        settings=(*MEMBER, "tensorboard"),
        example=f"swarm-node run watch story.toml --peers {ADDR}",
        options=RUN,
    ),
    Command(
        name="run export",
        purpose="Export a run's certified state, from checkpoints or from its members, as a Hugging Face model.",
        code="swarm_node.commands.run:export",
        settings=(*MEMBER, "tokenizer"),
        example="swarm-node run export story.toml --step 200",
        options={
            **RUN,
            "--out DIR": "The directory to create (default: RUN_ID-step-N in the current directory).",
            "--step N": "The outer step to export (default: the newest one available).",
            "--checkpoint DIR": "Export from this checkpoint, or from a directory of a run's checkpoints, offline.",
            "--publish NAME": "Also publish the model under NAME, signed with the key of this home (see models "
            "publish).",
        },
    ),
    Command(
        name="run resume",
        purpose="Let a run continue without members that are gone. Only the run's author can do this.",
        code="swarm_node.commands.run_orders:resume",
        settings=MEMBER,
        example=f"swarm-node run resume story.toml --peers {ADDR} --yes",
        options={
            **RUN_FILE,
            **SIGNER,
            "--members FILE": "Continue with these peers, one peer id a line (default: the last members that answer).",
            "--yes": "Sign and deliver the order; without this, only show what would be signed.",
        },
    ),
    Command(
        name="run endorse",
        purpose="Sign a run's newest state, so that newcomers can verify its history. Only the run's author can do "
        "this.",
        code="swarm_node.commands.run_orders:endorse",
        settings=MEMBER,
        example=f"swarm-node run endorse story.toml --peers {ADDR} --every 1h --yes",
        options={
            **RUN_FILE,
            **SIGNER,
            "--members FILE": "Ask only these peers for the run's state, one peer id a line (default: all members).",
            "--every TIME": "Repeat the endorsement at this interval, such as 30m or 1h, until the run is finished.",
            "--yes": "Sign and deliver the endorsement; without this, only show what would be signed.",
        },
    ),
    Command(
        name="run invite",
        purpose="Print an invitation to a run. Invited nodes skip probation. For its author and inviters.",
        code="swarm_node.commands.run_invite:invite",
        settings=(*HERE, "network_id"),
        example="swarm-node run invite story.toml --expires 7d --out alice.invitation",
        options={
            **RUN_FILE,
            **SIGNER,
            **EXPIRES,
            "--uses NUMBER": "Maximum number of nodes that may use the invitation (default: 1).",
            **FOR_NODE,
            **NEW_FILE,
        },
    ),
    Command(
        name="run revoke",
        purpose="Revoke invitations to a run, or an inviter. Only the run's author can do this.",
        code="swarm_node.commands.run_invite:revoke",
        settings=MEMBER,
        example=f"swarm-node run revoke story.toml --serial 4f0c2d9a51b37e86 --peers {ADDR}",
        options={
            **RUN_FILE,
            **SIGNER,
            "--serial SERIAL…": "Serial of an invitation (run invite and status show it). May be repeated.",
            "--inviter NODE": "Peer id of an inviter. All invitations from this inviter become invalid.",
        },
    ),
    Command(
        name="run vouch",
        purpose="As a member of a run, vouch for a newcomer, so that it skips probation.",
        code="swarm_node.commands.run_invite:vouch",
        settings=(*HERE, "network_id"),
        example="swarm-node run vouch story.toml --for-node 12D3KooW… --out bob.vouch",
        options={
            **RUN_FILE,
            "--for-node NODE": "The newcomer's peer id. On that machine, swarm-node identity shows the id.",
            **EXPIRES,
            **NEW_FILE,
        },
    ),
    Command(
        name="evidence list",
        purpose="List the evidence against members of runs and servers in this home, with its files.",
        code="swarm_node.commands.evidence_files:show",
        settings=HERE,
        example="swarm-node evidence list",
    ),
    Command(
        name="evidence verify",
        purpose="Check an evidence file offline. Exit code 0: it proves a lie; 1: it does not; 2: it cannot be "
        "checked.",
        code="swarm_node.commands.evidence_files:verify",
        settings=(*HERE, "data", "tokenizer"),
        example="swarm-node evidence verify 12D3KooW….evidence --run story.toml",
        options={
            "PATH": "The evidence file (see: swarm-node evidence list).",
            "--run FILE": "The run file that the evidence must belong to (default: the one in the evidence file).",
            "--state DIR": "Recompute an interval from this checkpoint of its start, instead of trusting the members' "
            "findings.",
            "--model DIR": "Recompute a server's answer with the published model in this directory.",
        },
    ),
    Command(
        name="models list",
        purpose="List the models of a network, with their revisions and whether all blocks are served.",
        code="swarm_node.commands.models:list_models",
        settings=(*MEMBER, "publisher"),
        example=f"swarm-node models list --peers {ADDR}",
    ),
    Command(
        name="models check",
        purpose="Check from a model's config and weight headers whether it can be served on this machine.",
        code="swarm_node.commands.models:check",
        settings=HERE,
        example="swarm-node models check OWNER/NAME",
        options={"MODEL": "A directory, or OWNER/NAME[@REVISION] on a hub."},
    ),
    Command(
        name="models publish",
        purpose="Sign a manifest of a model's files, so that clients can tell the model from others of the same name.",
        code="swarm_node.commands.models:publish",
        settings=HERE,
        example="swarm-node models publish ~/models/story --name story",
        options={
            "MODEL": "A directory, or OWNER/NAME[@REVISION] on a hub. A hub model is downloaded.",
            "--name NAME": "The published name (default: the directory's name, or NAME on the hub).",
            **SIGNER,
            "--out FILE": "Also write the manifest to this new file, besides swarm-model.manifest in the model's "
            "directory.",
        },
    ),
    Command(
        name="models verify",
        purpose="Check the files of a model against its publisher's manifest.",
        code="swarm_node.commands.models:verify",
        settings=("manifest",),
        about={
            "manifest": "The publisher's signed manifest. Default: swarm-model.manifest in the model's directory.",
        },
        example="swarm-node models verify ~/models/story --manifest story.manifest",
        options={"DIR": "The model's directory."},
    ),
    Command(
        name="chat",
        purpose="Chat with a model of a network. With a question on standard input, print one answer and exit.",
        code="swarm_node.commands.chat:run",
        settings=(*MEMBER, "publisher", *AT_HOME),
        example=f"swarm-node chat story --peers {ADDR}",
        options={
            "MODEL": "The model's name, or NAME@REVISION if several revisions are served.",
            "--system TEXT": "System message: instructions for the model.",
            "--temperature T": "Sampling temperature, 0 (the likeliest token) to 2 (default: the model's, or 0.7).",
            "--max-tokens N": "Maximum tokens of an answer (default: it ends by itself).",
        },
    ),
    Command(
        name="gateway",
        purpose="Serve the models of a network over an OpenAI-compatible HTTP API.",
        code="swarm_node.commands.daemons:gateway",
        settings=(
            *MEMBER,
            "name",
            *HTTP,
            "dashboard",
            "allowed_origins",
            "api_keys",
            "open_to_all",
            "requests_per_min",
            "tokens_per_min",
            "pin_model",
            "publisher",
            "spot_check",
            *AT_HOME,
            *LINK,
            *REACH,
            *PROCESS,
        ),
        example=f"swarm-node gateway --peers {ADDR} --port 8000",
    ),
    Command(
        name="dashboard",
        purpose="Serve a read-only web dashboard that shows a network's models, runs and nodes live.",
        code="swarm_node.commands.daemons:dashboard",
        settings=(*MEMBER, "name", *HTTP, *LINK, *REACH, *PROCESS),
        example=f"swarm-node dashboard --peers {ADDR} --host 0.0.0.0 --port 8001",
    ),
    Command(
        name="top",
        purpose="Show a network's models, runs and nodes live in the terminal. ? shows the keys, q quits.",
        code="swarm_node.top.command:run",
        settings=(*MEMBER, "url"),
        example=f"swarm-node top --peers {ADDR}",
        options={"--once": "Print the overview once as plain text and exit. This is the default without a terminal."},
    ),
    Command(
        name="invite create",
        purpose="Print an invitation to a private network that this home owns, or start such a network.",
        code="swarm_node.commands.invite:create",
        settings=(*HERE, "peers"),
        example="swarm-node invite create --rights join,ask --out alice.invitation",
        options={
            "--new-network": "Create a new private network, owned by this home. An existing network key is never "
            "overwritten.",
            "--rights RIGHTS": "What the invited node may do: a list of join, serve, train, ask (default: all).",
            **EXPIRES,
            **FOR_NODE,
            "--note NOTE": "A note for your own list, such as who gets the invitation.",
            **NEW_FILE,
        },
    ),
    Command(
        name="invite list",
        purpose="List the invitations to the private network of this home: serial, state, expiry and rights.",
        code="swarm_node.commands.invite:show",
        settings=HERE,
        example="swarm-node invite list",
    ),
    Command(
        name="invite revoke",
        purpose="Revoke an invitation to this home's private network. Members then refuse nodes that use it.",
        code="swarm_node.commands.invite:revoke",
        settings=(*HERE, "peers"),
        example="swarm-node invite revoke 0123456789abcdef",
        options={"SERIAL": "Serial of the invitation, as invite list shows it."},
    ),
    Command(
        name="status",
        purpose="Show the activity, limits and connections of this home's daemon.",
        code="swarm_node.commands.this_node:status",
        settings=HERE,
        example="swarm-node status --json",
    ),
    Command(
        name="drain",
        purpose="Make this home's daemon finish its work in flight and leave.",
        code="swarm_node.commands.this_node:drain",
        settings=HERE,
        example="swarm-node drain",
    ),
    Command(
        name="stop",
        purpose="Stop this home's daemon at once, without finishing its work.",
        code="swarm_node.commands.this_node:stop",
        settings=HERE,
        example="swarm-node stop --home /srv/swarm",
    ),
    Command(
        name="doctor",
        purpose="Check this machine for problems that keep a node from working, and say how to fix them.",
        code="swarm_node.commands.doctor:run",
        settings=(*MEMBER, "name", *REACH),
        example=f"swarm-node doctor --peers {ADDR}",
    ),
    Command(
        name="plan",
        purpose="Show which blocks of a model each node would serve, and how fast, before any node joins.",
        code="swarm_node.commands.plan:run",
        settings=("model", "dtype", *HERE),
        about={
            "model": "The Hugging Face model to plan for: a directory, or OWNER/NAME[@REVISION] on a hub.",
            "dtype": "Data type in which the nodes would hold the weights: float32, bfloat16, float16, int8 or int4.",
        },
        example="swarm-node plan --model ~/models/story --nodes nodes.toml",
        options={
            "--nodes FILE": "TOML file that describes each node in a [[nodes]] table: its name, its memory, such as "
            "24GiB, and its speed, as decode_ms_per_block or tokens_per_s."
        },
    ),
    Command(
        name="simulate",
        purpose="Simulate a network of thousands of nodes that join and leave, and report its performance.",
        code="swarm_node.commands.simulate:run",
        settings=(),
        example="swarm-node simulate scenario.toml --out report",
        options={
            "PATH": "The scenario file (TOML).",
            "--out FILE": "Write FILE.html and FILE.json (default: the scenario file's name with -report).",
            "--seed SEED": "Random seed, instead of the one in the file. Equal seeds give equal reports.",
        },
    ),
    Command(
        name="identity",
        purpose="Show this node's peer id, by which other nodes identify it.",
        code="swarm_node.commands.this_node:identity",
        settings=HERE,
        example="swarm-node identity --new",
        options={"--new": "Create the key. An existing key is never overwritten."},
    ),
    Command(
        name="demo",
        purpose="Demonstrate everything on this machine: nodes train and serve a model together, and one is killed.",
        code="swarm_node.demo.command:demo",
        settings=(),
        example="swarm-node demo --nodes 4 --keep demo",
        options={
            "--nodes N": f"Volunteers to start (default: {NUM_NODES}).",
            "--outer-steps N": f"Outer steps to train (default: {OUTER_STEPS}).",
            "--interval-steps N": f"Inner steps between two outer steps (default: {INTERVAL_STEPS}).",
            "--min-tokens N": "Minimum tokens of the completion. It continues until the killed node is noticed "
            f"(default: {MIN_NEW_TOKENS}).",
            "--prompt TEXT": "Text to complete (default: the beginning of a function).",
            "--temperature T": f"Sampling temperature; 0: always the likeliest byte (default: {TEMPERATURE}).",
            "--keep DIR": "Keep all files, including the trained model, in DIR.",
        },
    ),
)
