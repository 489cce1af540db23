"""Measures the machine's speed again while the node is idle, and announces the better figures.

The first measurement is made while the node starts, often together with other nodes on the same machine, and other work
only makes a figure worse. A process of its own measures (`swarm_node.machine.probe.main`), so that its memory and
threads are released afterwards. The daemon's task owns this module's task.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import sys
from dataclasses import replace
from typing import NoReturn

from swarm_protocol.errors import reason_of

from swarm_node.machine.hardware import Speeds
from swarm_node.node import Node

FIRST_S = 60.0
"""Wait after the start, and up to twice as long: nodes that start together do not measure together."""
AGAIN_S = 3600.0
TIMEOUT_S = 60.0

_PROGRAM = "from swarm_node.machine.probe import main; main()"

logger = logging.getLogger(__name__)


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
    """Raises OSError if no process can be started, ValueError or TypeError for one that fails or answers without sense,
    TimeoutError for one that takes too long."""
    arguments = (node.hardware.device, str(node.home.cache), str(node.config.threads))
    # the modules that are found here, and none that lie in the current directory
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
