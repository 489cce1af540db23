"""`swarm-node plan`: who would serve which blocks of a model, before anyone joins. The nodes come from a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from swarm.router.planner import Plan, PlannedNode, Taken, plan
from swarm.router.room import COMFORTABLE_SESSIONS
from swarm.router.routing import format_spans
from swarm_protocol.errors import ConfigError

from swarm_node import logs
from swarm_node.command_options import Flags
from swarm_node.commands.daemons import check_model
from swarm_node.events import Emitter
from swarm_node.home import Home
from swarm_node.memory_share import PROCESS_BYTES, share_of_told, told_for
from swarm_node.nodes_file import read_nodes


def run(flags: Flags) -> int:
    config, path = flags.resolve(), flags.paths["nodes"]
    model = config.model
    if model is None or path is None:
        missing = "--nodes FILE" if model else "--model MODEL"
        raise ConfigError(f"{missing} is missing", remedy="see swarm-node plan --help")
    check_model(config)
    if not path.is_file():
        raise ConfigError(f"cannot read {path}: it is no file", remedy="give --nodes a TOML file with a [[nodes]] each")
    # torch takes seconds to import: what is refused above is refused at once
    from swarm.serving.server.capability import planned_needs  # noqa: PLC0415
    from swarm.serving.server.server_options import ServerOptions  # noqa: PLC0415

    from swarm_node.model_source import find_source  # noqa: PLC0415

    logs.quieten_libraries()
    source = find_source(model, Home(config.home), lambda *_: None)
    needs = planned_needs(source.directory, ServerOptions(dtype=config.dtype))
    found = plan(needs, [_for_model(node) for node in read_nodes(path, needs.num_blocks)])
    emitter = Emitter(json=flags.json)
    if flags.json:
        _emit(emitter, model.name, needs.num_blocks, found)
    else:
        emitter.result("\n".join(_lines(model.name, needs.num_blocks, found)))
    return 0


def _for_model(node: PlannedNode) -> PlannedNode:
    """What a node is told with --max-memory is for all of the program."""
    try:
        model_bytes = share_of_told(node.memory_bytes, PROCESS_BYTES).model_bytes
    except ConfigError:
        model_bytes = 0
    return replace(node, memory_bytes=model_bytes)


def _emit(emitter: Emitter, model: str, num_blocks: int, found: Plan) -> None:
    hops = found.chain.hops if found.chain else ()
    emitter.emit(
        "plan",
        model=model,
        num_blocks=num_blocks,
        nodes=[_fields(taken) for taken in found.taken],
        lacking=[{"start": low, "end": high, "memory_bytes": told_for(size)} for (low, high), size in found.lacking],
        tokens_per_s=found.tokens_per_s,
        chain=[{"name": hop.peer_id, "start": hop.start, "end": hop.end, "ms": hop.cost_ms} for hop in hops],
        chain_ms=found.chain.cost_ms if found.chain else None,
    )


def _fields(taken: Taken) -> dict[str, object]:
    start, end = taken.span or (None, None)
    return {
        "name": taken.name,
        "start": start,
        "end": end,
        "kv_tokens": taken.kv_tokens,
        "reason": taken.reason,
    }


def _lines(model: str, num_blocks: int, found: Plan) -> Iterator[str]:
    yield f"{model}: {num_blocks} blocks"
    width = max(len(taken.name) for taken in found.taken)
    for taken in found.taken:
        span = f"{taken.span[0]}:{taken.span[1]}" if taken.span else "nothing"
        room = f"{taken.kv_tokens:,} tokens of cache; " if taken.span else ""
        yield f"  {taken.name:<{width}}  {span:<12} {room}{taken.reason}"
    if found.lacking:
        yield f"missing: {format_spans([span for span, _ in found.lacking])}"
        for (low, high), size in found.lacking:
            yield (
                f"  → a node with {told_for(size) / 2**30:.2f} GiB would serve {low}:{high} "
                f"with the cache of {COMFORTABLE_SESSIONS} sessions"
            )
        return
    assert found.chain is not None
    route = " → ".join(f"{hop.peer_id} {hop.start}:{hop.end}" for hop in found.chain.hops)
    yield f"speed: {found.tokens_per_s:.1f} tokens/s over all requests, without batching"
    yield f"one request: {1000 / found.chain.cost_ms:.1f} tokens/s, {found.chain.cost_ms:.1f} ms a token over {route}"
