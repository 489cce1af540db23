"""How each setting of a node is read and explained: one line of the file, one environment variable, one flag.

Their defaults are the fields of `config.Config`, and a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from swarm.network.multiaddr import check_announce_addr, check_listen_addr

from swarm_node.settings import (
    one_of,
    parse_bool,
    parse_device,
    parse_endpoint,
    parse_host_name,
    parse_model,
    parse_network_id,
    parse_node_name,
    parse_path,
    parse_peer,
    parse_pin,
    parse_proxy,
    parse_run,
    parse_size,
    parse_span,
    parse_url,
    seconds,
    whole_number,
)


@dataclass(frozen=True, slots=True)
class Setting:
    """How one field of Config is read and explained. Without a `metavar` it is a switch; `many` may be repeated.

    `example` is what to write where the default would be no example.
    """

    parse: Callable[[str], object]
    metavar: str
    about: str
    many: bool = False
    example: str = ""


SETTINGS: Mapping[str, Setting] = {
    "home": Setting(
        parse_path, "DIR", "The node's directory: identity, control socket, cache, checkpoints, log.", example="~/swarm"
    ),
    "name": Setting(parse_node_name, "NAME", "Name that others see. Default: this machine's.", example="attic"),
    "network_id": Setting(parse_network_id, "ID", "Network to be part of; others are not spoken to."),
    "peers": Setting(
        parse_peer,
        "ADDR…",
        "Address of a peer to join through, as `seed` prints it. Not needed where peers are remembered.",
        many=True,
    ),
    "url": Setting(parse_url, "URL", "Dashboard to read from, instead of peers.", example="http://127.0.0.1:8000"),
    "listen": Setting(
        check_listen_addr, "ADDR", "Address to listen on; port 0: any free one; 0.0.0.0: for all to reach.", many=True
    ),
    "announce": Setting(
        check_announce_addr, "ADDR", "Address to tell others instead of the one listened on.", many=True
    ),
    "relay": Setting(
        one_of("auto", "use", "none"), "WHEN", "Be reached through a seed: auto (unless all is local), use or none."
    ),
    "run": Setting(
        parse_run,
        "RUN",
        "Train this run: its signed file, or its id, for which its members give the file.",
        example="run.toml",
    ),
    "then_serve": Setting(parse_bool, "", "Once the run is finished, serve its result.", example="true"),
    "model": Setting(
        parse_model,
        "MODEL",
        "Serve blocks of this Hugging Face model: a directory, or OWNER/NAME[@REVISION] on a hub.",
        example="~/models/story",
    ),
    "take": Setting(
        one_of("any", "models", "runs", "nothing"),
        "WHAT",
        "What to help with where neither a run nor a model is named: any, models, runs or nothing.",
    ),
    "dtype": Setting(
        one_of(
            *("float32", "bfloat16", "float16", "int8", "int4"),
            synonyms={"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"},
        ),
        "DTYPE",
        "Weights as they are held: float32, "
        "bfloat16, float16, or int8 or int4 that compute in bfloat16. Servers of different ones answer differently.",
    ),
    "blocks": Setting(parse_span, "START:END", "Serve exactly this half-open span of blocks.", example="0:8"),
    "max_blocks": Setting(whole_number(0, 4096), "N", "Serve at most so many blocks; 0: no limit.", example="8"),
    "max_memory": Setting(
        parse_size,
        "SIZE",
        "At most this much memory while it serves, the program's own included; 0: most of what is free.",
        example="6GiB",
    ),
    "device": Setting(one_of("auto", "cpu", "cuda", "mps"), "DEVICE", "Where to compute: auto, cpu, cuda or mps."),
    "threads": Setting(whole_number(0, 4096), "N", "CPU threads to compute with; 0: all cores.", example="4"),
    "probe": Setting(one_of("auto", "fresh", "off"), "WHEN", "Measure speed: auto (once), fresh or off."),
    "keep_checkpoints": Setting(whole_number(1, 1000), "N", "Checkpoints to keep of each run."),
    "keep_every": Setting(
        whole_number(0, 10_000_000),
        "N",
        "Keep the checkpoint of every N-th outer step for good, for run export; 0: of none.",
        example="100",
    ),
    "data": Setting(
        parse_path,
        "PATH",
        "What to train on where the run leaves that to its members: a file, or a folder of text, .jsonl, .parquet "
        "or .arrow files. Its tokens are kept in ~/.cache/swarm/tokens (XDG_CACHE_HOME) for all homes of this user.",
        example="~/books",
    ),
    "tokenizer": Setting(
        parse_path,
        "PATH",
        "The tokenizer of a run that leaves that to its members: a tokenizer.json, or its directory.",
        example="~/models/story",
    ),
    "start": Setting(
        parse_path,
        "DIR",
        "This machine's copy of the checkpoint that the run starts from: a Hugging Face model directory.",
        example="~/models/story",
    ),
    "devices": Setting(
        parse_device,
        "DEVICES",
        "Train on these together, as one member: cuda:0,cuda:1, or cpu for each process that is wanted.",
        many=True,
        example="cuda:0,cuda:1",
    ),
    "micro_batch": Setting(
        whole_number(0, 1 << 16),
        "N",
        "Samples that training computes at a time; 0: a whole batch.",
        example="1",
    ),
    "autocast": Setting(parse_bool, "", "Train with matrix products in bfloat16; weights stay fp32.", example="true"),
    "checkpoint_activations": Setting(
        parse_bool, "", "Train in less memory: compute activations again for the gradient.", example="true"
    ),
    "compile": Setting(parse_bool, "", "Train a model that torch has compiled; pays in long runs.", example="true"),
    "tensorboard": Setting(
        parse_path,
        "DIR",
        "Write the run's curves there as TensorBoard's event files: in a folder for each run and node.",
        example="~/curves",
    ),
    "host": Setting(str, "HOST", "Address for HTTP to listen on; 0.0.0.0: for all to reach."),
    "port": Setting(whole_number(0, 65535), "PORT", "Port for HTTP to listen on; 0: any free one."),
    "allowed_hosts": Setting(
        parse_host_name,
        "NAME…",
        "Public name that HTTP is asked for by, as through a proxy; *.NAME: those right below it; *: any. Others than "
        "these, addresses and names without a dot are refused.",
        many=True,
        example="swarm.example.org",
    ),
    "trusted_proxies": Setting(
        parse_proxy,
        "ADDR…",
        "Address or network of a proxy in front, whose X-Forwarded-For or Forwarded header says who asks. From others "
        "these headers are ignored.",
        many=True,
        example="127.0.0.1",
    ),
    "api_keys": Setting(
        parse_path,
        "FILE",
        "Ask for keys: lines of `name key [requests_per_min] [tokens_per_min]`, read again when they change.",
        example="keys.txt",
    ),
    "open_to_all": Setting(parse_bool, "", "Let others than this machine in without a key.", example="true"),
    "requests_per_min": Setting(
        whole_number(0, 10**9),
        "N",
        "Requests a minute for a key without its own, or for each address; 0: no limit. Default: 600 where others "
        "come in without a key.",
        example="60",
    ),
    "tokens_per_min": Setting(
        whole_number(0, 10**9), "N", "The same for tokens, of prompts and answers; 0: no limit.", example="100000"
    ),
    "pin_model": Setting(
        parse_pin,
        "MODEL@REVISION",
        "Use only that revision of a model, whatever else is served under its name; as `swarm-node models` shows it.",
        many=True,
        example="story@1a2b3c4d5e6f",
    ),
    "dashboard": Setting(parse_bool, "", "Show the network at /, to whoever reaches the gateway.", example="true"),
    "history": Setting(
        str,
        "FILE|URL",
        "What the dashboard remembers in: a file, or a database such as postgresql+pg8000://user@host/swarm. Default: "
        "history.sqlite in the home.",
        example="postgresql+pg8000://user@host/swarm",
    ),
    "checkpoints": Setting(
        parse_path,
        "DIR",
        "Let visitors of the dashboard download what lies here, in a folder for each run, named by its id.",
        example="~/swarm/checkpoints",
    ),
    "tethered": Setting(
        parse_bool, "", "Leave at once when standard input ends: whoever started this node is gone.", example="true"
    ),
    "drain_s": Setting(seconds(0, 3600), "SECONDS", "Time that work in flight gets to finish when leaving."),
    "metrics": Setting(
        parse_endpoint,
        "HOST:PORT",
        "Answer Prometheus there, under /metrics; port 0: any free one. Default: nothing listens.",
        example="127.0.0.1:9401",
    ),
    "otlp": Setting(
        parse_url,
        "URL",
        "Send traces of requests and rounds to this OpenTelemetry collector, by OTLP over HTTP.",
        example="http://127.0.0.1:4318",
    ),
    "log_format": Setting(one_of("human", "json"), "FORMAT", "Log lines: human or json."),
    "log_level": Setting(one_of("debug", "info", "warning", "error"), "LEVEL", "Least severe log lines that are kept."),
}
