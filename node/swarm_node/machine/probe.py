"""Chooses the device that this machine computes with, and measures its speed.

A speed is in tokens per second through one real transformer block: a Llama block of a fixed size in fp32, so that
figures of different nodes are comparable. Planners scale them to a real model. The home caches speeds for the same
device, library versions and number of threads. Memory is read anew each time.

The first measurement happens while the node starts, often together with other nodes on the same machine, and other work
only lowers the figures. So `keep_measuring` measures again while the node is idle, and announces better figures. It
measures in a separate process (`main`), so that memory and threads are released afterwards.

Imports torch, which takes seconds. Functions block and must run off the event loop, except `keep_measuring`, whose task
the daemon owns.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import torch
from swarm.machine_memory import machine_memory
from swarm_protocol.errors import ConfigError, reason_of

from swarm_node.machine.hardware import Hardware, Speeds, cpu_name
from swarm_node.machine.lean_imports import lean_imports
from swarm_node.storage.home import JsonMemory

if TYPE_CHECKING:
    from swarm_node.node import Node

# one block of about 5M parameters: large enough to be compute-bound, and measured in a moment
HIDDEN, HEADS, INTERMEDIATE = 512, 8, 1376
PREFILL_TOKENS = 128
TRAINING_ROWS, TRAINING_TOKENS = 2, 128
BUDGET_S = 0.4  # seconds for each of the three figures
MAX_FILE_BYTES = 4096


def measure(device: str) -> Speeds:
    """Run the reference block on torch's `device`. Takes about 1.5 s."""
    # imported late: it takes a second, and most starts use cached speeds
    with lean_imports():
        from swarm.serving.model.attention import cache_argument  # noqa: PLC0415
        from transformers import DynamicCache, LlamaConfig, LlamaModel  # noqa: PLC0415

    config = LlamaConfig(
        vocab_size=8,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=2**16,
    )
    model = LlamaModel(config).to(device)
    prompt_BTD = torch.zeros(1, PREFILL_TOKENS, HIDDEN, device=device)
    batch_BTD = torch.randn(TRAINING_ROWS, TRAINING_TOKENS, HIDDEN, device=device)
    cached = {cache_argument(model): DynamicCache(config=config)}

    def prefill() -> None:
        with torch.inference_mode():
            model(inputs_embeds=prompt_BTD, use_cache=False)

    def decode() -> None:
        with torch.inference_mode():
            model(inputs_embeds=prompt_BTD[:, :1], **cached, use_cache=True)

    def train() -> None:
        model(inputs_embeds=batch_BTD, use_cache=False).last_hidden_state.square().mean().backward()

    def finished() -> None:
        if device == "cuda":
            torch.cuda.synchronize()
        elif device == "mps":
            torch.mps.synchronize()

    return Speeds(
        prefill_tokens_per_s=PREFILL_TOKENS / _best_s(prefill, finished),
        decode_tokens_per_s=1 / _best_s(decode, finished),
        training_tokens_per_s=TRAINING_ROWS * TRAINING_TOKENS / _best_s(train, finished),
    )


def _best_s(run: Callable[[], None], finished: Callable[[], None]) -> float:
    """Return the seconds of the fastest `run` within BUDGET_S, after a warm-up. Slower runs shared the machine."""
    run()
    finished()
    best_s = float("inf")
    until = time.perf_counter() + BUDGET_S
    while time.perf_counter() < until or best_s == float("inf"):
        start = time.perf_counter()
        run()
        finished()
        best_s = min(best_s, time.perf_counter() - start)
    return best_s


logger = logging.getLogger(__name__)


def examine(device: str, cache: Path, *, probe: str, threads: int) -> Hardware:
    """Examine the machine. `probe` is `auto` (use speeds cached in the directory `cache`), `fresh` (measure) or `off`.

    Raises ConfigError if `device` does not exist.
    """
    if threads:
        torch.set_num_threads(threads)
    chosen = choose_device(device)
    name = device_name(chosen)
    return Hardware.of(
        chosen,
        name,
        partial(memory, chosen),
        speeds=Speeds() if probe == "off" else _remembered(chosen, name, cache / "probe.json", fresh=probe == "fresh"),
    )


def choose_device(wanted: str) -> str:
    """Return the device to use. `auto` takes the first available of CUDA (also ROCm), MPS and CPU."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        return next(name for name, is_there in there.items() if is_there)
    if not there[wanted]:
        found = " or ".join(name for name, is_there in there.items() if is_there)
        raise ConfigError(
            f"there is no {wanted} device that torch {torch.__version__} can use", remedy=f"give --device {found}"
        )
    return wanted


def device_name(device: str) -> str:
    if device == "cuda":
        return f"{'ROCm' if torch.version.hip else 'CUDA'} {torch.cuda.get_device_name()}"
    if device == "mps":
        return f"MPS {platform.machine()}"
    return cpu_name()


def memory(device: str) -> tuple[int, int]:
    """Return the free and total bytes of the memory in which `device` computes."""
    if device == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info()
        return free_bytes, total_bytes
    return machine_memory()


def measure_again(device: str, cache: Path, threads: int) -> Speeds:
    """Measure, and return the better of each cached and new figure, because other work only lowers them. Updates the
    cache."""
    if threads:
        torch.set_num_threads(threads)
    kept = _memory(cache / "probe.json", _key(device, device_name(device)))
    known, found = asdict(kept.read(_speeds) or Speeds()), asdict(measure(device))
    best = Speeds(**{name: max(speed, known[name]) for name, speed in found.items()})
    kept.keep(asdict(best))
    return best


def main() -> None:
    """Run `measure_again` in a separate process: its arguments are device, cache and threads, and it prints JSON."""
    device, cache, threads = sys.argv[1:]
    sys.stdout.write(json.dumps(asdict(measure_again(device, Path(cache), int(threads)))))


def _remembered(device: str, name: str, path: Path, *, fresh: bool) -> Speeds:
    kept = _memory(path, _key(device, name))
    if not fresh and (speeds := kept.read(_speeds)) is not None:
        measured = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
        logger.info("using speeds measured on %s; --probe fresh measures again", measured)
        return speeds
    speeds = measure(device)
    kept.keep(asdict(speeds))
    return speeds


def _key(device: str, name: str) -> str:
    versions = f"torch {torch.__version__} transformers {metadata.version('transformers')}"
    return f"{device} {name} {versions} threads {torch.get_num_threads()}"


def _memory(path: Path, key: str) -> JsonMemory:
    return JsonMemory(path=path, owner=("key", key), key="speeds", what="the measured speed", max_bytes=MAX_FILE_BYTES)


def _speeds(kept: dict[str, float]) -> Speeds:
    return Speeds(**kept)


FIRST_S = 60.0
"""Seconds to wait after the start. The wait is up to twice as long, so that nodes that start together measure at
different times."""
AGAIN_S = 3600.0
TIMEOUT_S = 60.0

_PROGRAM = "from swarm_node.machine.probe import main; main()"


async def keep_measuring(node: Node) -> NoReturn:
    """Measure until cancelled, whenever the node is idle."""
    wait_s = FIRST_S
    while True:
        await asyncio.sleep(wait_s * random.uniform(1, 2))
        wait_s = FIRST_S
        if is_idle(node) and (speeds := await measured_apart(node)) is not None:
            node.hardware = replace(node.hardware, speeds=speeds)
            await node.announce()
            wait_s = AGAIN_S


def is_idle(node: Node) -> bool:
    """Return whether the node neither trains, nor answers requests, nor leaves."""
    serving = node.activity.serving
    is_answering = serving is not None and (serving.num_sessions > 0 or serving.tokens_per_s > 0)
    return node.activity.training is None and not is_answering and not node.shutdown.leaving.is_set()


async def measured_apart(node: Node) -> Speeds | None:
    """Return the best figures so far, or None with a warning if the machine cannot be measured now."""
    try:
        return await _measured(node)
    except TimeoutError:
        reason = f"it takes longer than {TIMEOUT_S:.0f} s"
    except (OSError, ValueError, TypeError) as error:
        reason = reason_of(error)
    logger.warning("the machine's speed could not be measured again: %s", reason)
    return None


async def _measured(node: Node) -> Speeds:
    """Measure in a separate process.

    Raises OSError if it cannot start, ValueError or TypeError if it fails or prints invalid output, and TimeoutError if
    it takes too long.
    """
    arguments = (node.hardware.device, str(node.home.cache), str(node.config.threads))
    # use the modules of this process, and none from the current directory
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", _PROGRAM, *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, complaint = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise ValueError(complaint.decode(errors="replace").strip().rpartition("\n")[2][:200])
    return Speeds(**json.loads(output))
