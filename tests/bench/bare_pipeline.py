"""The best that a pipeline of processes can do on this machine, as one JSON line: the servers' own spans with a bare
pipe between them.

    python -m bench.bare_pipeline MODEL_DIR THREADS NUM_TOKENS START:END...

Only one stage computes at a time, and its threads sleep between its steps as a server's do. What the swarm needs beyond
this is its own: the event loops, the daemons, and the client.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

from swarm_node.machine.lean_imports import let_threads_sleep

NUM_WARM = 8


def serve(directory: str, span: tuple[int, int], num_threads: int, before: Connection, after: Connection) -> None:
    """Run the blocks of `span` on each message: the position, then token ids or hidden states."""
    import torch  # noqa: PLC0415 - once the environment says how its threads wait
    from swarm.serving.model.batch import Batch, SequenceRows, Want  # noqa: PLC0415
    from swarm.serving.model.kv_pool import PAGE_TOKENS  # noqa: PLC0415
    from swarm.serving.model.model_files import open_model  # noqa: PLC0415
    from swarm.serving.model.span_loading import load_span  # noqa: PLC0415

    torch.set_num_threads(num_threads)
    blocks = load_span(open_model(Path(directory)), *span)
    pool = blocks.new_pool(num_pages := 16)
    is_last = span[1] == blocks.num_blocks
    want = Want.LAST if is_last else Want.ALL
    with contextlib.suppress(EOFError):  # the figures are taken
        while True:
            position, content = before.recv()
            x = torch.from_numpy(content)
            rows = SequenceRows(num_tokens=len(x), position=position, pages=range(num_pages), want=want)
            assert position + len(x) <= num_pages * PAGE_TOKENS
            out = blocks.run(Batch(x=x, pieces=(rows,), start=span[0], end=span[1]), pool)[0]
            assert out is not None
            after.send((position + len(x), out.argmax(-1).numpy()) if is_last else (position, out.numpy()))


def main(directory: str, num_threads: int, num_tokens: int, spans: list[tuple[int, int]]) -> None:
    import numpy as np  # noqa: PLC0415
    from bench.local_transformers import prompt_ids  # noqa: PLC0415

    context = multiprocessing.get_context("spawn")
    received, first = context.Pipe(duplex=False)
    for span in spans:
        next_received, sent = context.Pipe(duplex=False)
        arguments = directory, span, num_threads, received, sent
        context.Process(target=serve, args=arguments, daemon=True).start()
        received = next_received

    def seconds(num_tokens: int) -> float:
        message = 0, np.array(prompt_ids(0))
        since = time.perf_counter()
        for _ in range(num_tokens):
            first.send(message)
            message = received.recv()
        return time.perf_counter() - since

    seconds(NUM_WARM)
    print(json.dumps({"one_tokens_per_s": num_tokens / seconds(num_tokens)}))


if __name__ == "__main__":
    let_threads_sleep()
    each = [span.partition(":") for span in sys.argv[4:]]
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), [(int(start), int(end)) for start, _, end in each])
