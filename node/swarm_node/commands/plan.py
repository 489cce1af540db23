"""`swarm-node plan`: which node would serve which blocks of a model, before any node joins.

The nodes come from a TOML file:

    [[nodes]]
    name = "attic"
    memory = "24GiB"                 # for the whole program, as with --max-memory
    decode_ms_per_block = 3.0        # or tokens_per_s = 10.4, the speed if the node held the whole model
    prefill_ms_per_token = 0.1       # of one block; optional, like the next two
    relayed = false
    rtt = { cellar = 1.2, client = 20.0 }   # milliseconds; 50 for nodes that are not named
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from swarm.router.block_budget import COMFORTABLE_SESSIONS
from swarm.router.planner import PlacementPlan, PlannedNode, plan
from swarm.router.routing import format_spans
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError
from swarm_protocol.toml_text import parse_toml

from swarm_node import diagnostics
from swarm_node.commands.command_options import Flags, say_loading, say_lookup
from swarm_node.commands.daemons import check_model_directories
from swarm_node.events.emitter import Emitter
from swarm_node.formatting import plural, size
from swarm_node.machine.hardware import PROCESS_BYTES, limit_for, share_of_limit
from swarm_node.machine.lean_imports import lean_imports
from swarm_node.settings.config import UsageError
from swarm_node.settings.parsers import parse_node_name, parse_size
from swarm_node.storage.home import Home, read_text

T = TypeVar("T")


def run(flags: Flags) -> int:
    config, path = flags.resolve(), flags.options["nodes"]
    model = config.model
    if model is None or path is None:
        missing = "--nodes FILE" if model else "--model MODEL"
        raise UsageError(f"{missing} is missing", remedy="see swarm-node plan --help")
    check_model_directories(config)
    if not path.is_file():
        raise ConfigError(
            f"cannot read {path}: it is not a file", remedy="give --nodes a TOML file with [[nodes]] tables"
        )
    text = read_text(path, MAX_FILE_BYTES, "check --nodes: it takes a nodes file")
    parse_nodes(text, path, 1)  # refuses a wrong file before torch is imported: the number of blocks is not known yet
    emitter = Emitter(json=flags.json)
    say_loading(emitter)
    with lean_imports():
        from swarm.serving.server.capability import planned_needs  # noqa: PLC0415
        from swarm.serving.server.deployment import ServerOptions  # noqa: PLC0415

        from swarm_node.roles.sources import find_source  # noqa: PLC0415

    diagnostics.quieten_libraries()
    say_lookup(model, emitter)
    source = find_source(model, Home(config.home), lambda *_: None)
    needs = planned_needs(source.directory, ServerOptions(dtype=config.dtype))
    nodes = parse_nodes(text, path, needs.num_blocks)
    shares = [_model_share(node) for node in nodes]
    found = plan(needs, [replace(node, memory_bytes=share) for node, (share, _) in zip(nodes, shares, strict=True)])
    taken = (replace(each, reason=why or each.reason) for each, (_, why) in zip(found.taken, shares, strict=True))
    found = replace(found, taken=tuple(taken))
    if flags.json:
        _emit(emitter, model.name, needs.num_blocks, found)
    else:
        emitter.result("\n".join(_lines(model.name, needs.num_blocks, found)))
    return 0


def _model_share(node: PlannedNode) -> tuple[int, str]:
    """Return the memory in bytes that is left for the model, or 0 and the reason why none is left.

    The node's memory is for the whole program, as with --max-memory.
    """
    try:
        return share_of_limit(node.memory_bytes, PROCESS_BYTES).model_bytes, ""
    except ConfigError as error:
        return 0, error.message


def _emit(emitter: Emitter, model: str, num_blocks: int, found: PlacementPlan) -> None:
    hops = found.chain.hops if found.chain else ()
    emitter.emit(
        "plan",
        model=model,
        num_blocks=num_blocks,
        nodes=[
            {
                "name": taken.name,
                **dict(zip(("start", "end"), taken.span or (None, None), strict=True)),
                "kv_tokens": taken.kv_tokens,
                "reason": taken.reason,
            }
            for taken in found.taken
        ],
        lacking=[{"start": low, "end": high, "memory_bytes": limit_for(size)} for (low, high), size in found.lacking],
        tokens_per_s=found.tokens_per_s,
        chain=[{"name": hop.peer_id, "start": hop.start, "end": hop.end, "ms": hop.cost_ms} for hop in hops],
        chain_ms=found.chain.cost_ms if found.chain else None,
    )


def _lines(model: str, num_blocks: int, found: PlacementPlan) -> Iterator[str]:
    yield f"{model}: {plural(num_blocks, 'block')}"
    width = max(len(taken.name) for taken in found.taken)
    for taken in found.taken:
        span = f"{taken.span[0]}:{taken.span[1]}" if taken.span else "nothing"
        room = f"{taken.kv_tokens:,} tokens of cache; " if taken.span else ""
        yield f"  {taken.name:<{width}}  {span:<12} {room}{taken.reason}"
    if found.lacking:
        yield f"missing: {format_spans([span for span, _ in found.lacking])}"
        for (low, high), num_bytes in found.lacking:
            yield (
                f"  → a node with {size(limit_for(num_bytes))} would serve {low}:{high} "
                f"with the cache of {COMFORTABLE_SESSIONS} sessions"
            )
        return
    assert found.chain is not None
    route = " → ".join(f"{hop.peer_id} {hop.start}:{hop.end}" for hop in found.chain.hops)
    yield f"speed: {found.tokens_per_s:.1f} tokens/s over all requests, without batching"
    yield f"one request: {1000 / found.chain.cost_ms:.1f} tokens/s, {found.chain.cost_ms:.1f} ms a token over {route}"


MAX_NODES = 1000
MAX_FILE_BYTES = 2**20
CLIENT = "client"
_KEYS = ("name", "memory", "decode_ms_per_block", "tokens_per_s", "prefill_ms_per_token", "relayed", "rtt")
_SHORTEST = 'for each node a table [[nodes]] with name = "attic", memory = "24GiB", decode_ms_per_block = 3.0'


def parse_nodes(text: str, path: Path, num_blocks: int) -> list[PlannedNode]:
    """Return the nodes to plan for, from the TOML `text` of the file `path`. Raises ConfigError."""
    table = parse_toml(text, path, remedy=f"write {_SHORTEST}")
    _refuse_unknown(table, ("nodes",), f"the nodes file {path}")
    entries = table.get("nodes")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{path} names no nodes", remedy=f"write {_SHORTEST}")
    if len(entries) > MAX_NODES:
        raise ConfigError(f"{path} names {len(entries)} nodes, more than {MAX_NODES}", remedy="plan for fewer")
    nodes = [_node(entry, f"node {index + 1} in {path}", num_blocks) for index, entry in enumerate(entries)]
    names = [node.name for node in nodes]
    for node in nodes:
        if names.count(node.name) > 1 or node.name == CLIENT:
            what = f"{path} uses the name {node.name!r} for two nodes, or for a node and the client"
            raise ConfigError(what, remedy="rename a node")
        _refuse_unknown(node.rtt_ms, (*names, CLIENT), f"rtt of {node.name} in {path}")
    return nodes


def _node(entry: Mapping[str, Any], where: str, num_blocks: int) -> PlannedNode:
    _refuse_unknown(entry, _KEYS, where)
    name = _parsed(entry, "name", where, parse_node_name)
    memory_bytes = _parsed(entry, "memory", where, parse_size)
    if not 0 < memory_bytes <= limits.MAX_MEMORY_BYTES:
        raise ConfigError(
            f"memory of {where} is {memory_bytes} bytes", remedy='write the memory that the node has, such as "24GiB"'
        )
    if ("decode_ms_per_block" in entry) == ("tokens_per_s" in entry):
        raise ConfigError(f"{where} needs decode_ms_per_block or tokens_per_s", remedy="give one of them")

    def number(key: str, value: Any, high: float, *, above_zero: bool = False) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and 0 <= value <= high and not (above_zero and value == 0):
            return float(value)
        low = "above 0" if above_zero else "from 0"
        raise ConfigError(f"{key} of {where} is {value!r}", remedy=f"write a number {low} to {high:g}")

    if "tokens_per_s" in entry:
        tokens_per_s = number("tokens_per_s", entry["tokens_per_s"], limits.MAX_TOKENS_PER_S, above_zero=True)
        decode_ms = min(1000 / (tokens_per_s * num_blocks), limits.MAX_BLOCK_MS)
    else:
        decode_ms = number("decode_ms_per_block", entry["decode_ms_per_block"], limits.MAX_BLOCK_MS, above_zero=True)
    relayed, rtts = entry.get("relayed", False), entry.get("rtt", {})
    if not isinstance(relayed, bool) or not isinstance(rtts, dict):
        raise ConfigError(
            f"relayed or rtt of {where} has the wrong type", remedy="write relayed = true, rtt = { attic = 1.2 }"
        )
    rtt_ms = {other: number(f"rtt.{other}", rtt, limits.MAX_RTT_MS) for other, rtt in rtts.items()}
    return PlannedNode(
        name=name,
        memory_bytes=memory_bytes,
        decode_ms=decode_ms,
        prefill_ms=number("prefill_ms_per_token", entry.get("prefill_ms_per_token", 0), limits.MAX_BLOCK_MS),
        relayed=relayed,
        client_rtt_ms=rtt_ms.pop(CLIENT, None),
        rtt_ms=rtt_ms,
    )


def _parsed(entry: Mapping[str, Any], key: str, where: str, parse: Callable[[str], T]) -> T:
    """Return what `parse` makes of the value of a required key. Raises ConfigError."""
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ConfigError(f"{where} has no {key}", remedy=f"write {_SHORTEST}")
    try:
        return parse(str(value))
    except ValueError as error:
        raise ConfigError(f"{key} of {where} {error}", remedy=f"write {_SHORTEST}") from error


def _refuse_unknown(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in given:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            listed = ", ".join(known[:10])
            raise ConfigError(
                f"{where} has the unknown key {key!r}",
                remedy=f"did you mean {close[0]}?" if close else f"use one of {listed}",
            )
