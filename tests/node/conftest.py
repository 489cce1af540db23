"""Each test's changes to the whole process, which a command makes, are undone after it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import pytest
from swarm_node import diagnostics


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
