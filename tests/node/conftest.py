"""Each test's changes to the whole process, which a command makes, are undone after it. HTTP servers end soon."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import uvicorn.server
from swarm_node import diagnostics


@pytest.fixture(autouse=True, scope="session")
def _http_servers_end_soon() -> Iterator[None]:
    """uvicorn looks every 0.1 s whether it should end, and then waits as long: hundreds of tests would wait, too."""
    hasty = SimpleNamespace(**{**vars(asyncio), "sleep": lambda seconds: asyncio.sleep(seconds / 20)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", hasty)
        yield


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    for handler in root.handlers:
        if handler not in handlers:
            with contextlib.suppress(OSError):  # the full disk of a test
                handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)
    for name in diagnostics.OURS:
        logging.getLogger(name).setLevel(logging.NOTSET)
