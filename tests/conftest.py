from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

# a shell ignores Ctrl-C for what it starts in the background, and what the tests start would inherit that
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# torch reads it at import, child processes inherit it: for models this small, threads only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings
from support import unpacked_daemon
from support.cpu_durations import CpuDurations
from swarm.heap import absent
from swarm_node.machine.lean_imports import UNUSED_PACKAGES
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

# hundreds of processes import the same: where Python is told to keep no bytecode, each would compile it anew
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

TESTS = Path(__file__).parent
OPTIONAL = ("chaos", "bench", "internet")
DEFAULT_MARKS = " and ".join(f"not {name}" for name in OPTIONAL)
"""What `addopts` selects by."""

LONGEST = (
    "node/daemon/test_volunteers.py",
    "node/demo/test_demo_end_to_end.py",
    "node/dashboard/test_pages_browser.py",
    "swarm/network/test_conformance.py",
    "swarm/network/relay/test_relay.py",
    "node/gateway/test_gateway_swarm.py",
)
"""Files that take a worker half a minute or more, most of it waiting."""

FORKING = (
    "node/daemon/test_volunteers.py",
    "node/demo/test_demo_end_to_end.py",
    "interop/test_interop.py",
    "swarm/serving/model/test_load_memory.py",
    "swarm/training/test_stopped_process.py",
)
"""Files that fork a process with torch: one worker has them, since each would start such a process."""

# a busy machine is not a bug: examples have no deadline of their own, tests have pytest's timeout
settings.register_profile("swarm", deadline=None, max_examples=25)
# `--hypothesis-profile thorough`: for changes of what such a test is about
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile("swarm")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-durations", type=int, metavar="N", help="show the N tests that take most processor time")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == DEFAULT_MARKS:
        if config.pluginmanager.has_plugin("cacheprovider") and "PYTEST_XDIST_WORKER" not in os.environ:
            unpacked_daemon.prepare(config.cache.mkdir("libp2p-daemon"))
        unpacked_daemon.use()
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        share_compilation(config, int(worker[2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    if num_shown := config.getoption("--cpu-durations"):
        config.pluginmanager.register(CpuDurations(num_shown))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the folders of which the default run takes no test, rather than import all their modules first."""
    is_default = config.option.markexpr == DEFAULT_MARKS
    return True if is_default and collection_path.parent == TESTS and collection_path.name in OPTIONAL else None


@pytest.fixture(autouse=True, scope="session")
def own_token_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nodes share the tokens of this user's cache: those of tests keep theirs apart."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("user-cache"))


@pytest.fixture
def only_errors_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Log only errors: a run with hostile or dying members warns thousands of times, which takes time."""
    caplog.set_level(logging.ERROR, logger="swarm")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """What is imported and made here stays to the end: no garbage collection looks through its million objects.

    A full collection would take a second, and tests of leaks ask for many. Libraries find the packages that they find
    in a node. From then on, garbage is looked for as often as there (`swarm_node.cli`): Python's own threshold is for
    programs with far fewer objects.
    """
    gc.disable()
    try:
        # a bench may import a library that wants them
        is_default = session.config.option.markexpr == DEFAULT_MARKS
        with absent(*(UNUSED_PACKAGES if is_default else ())):
            collected = yield
        if os.environ.get("PYTEST_XDIST_WORKER") == "gw0":
            compile_once()
        let_libraries_log_through_the_root()
        return collected
    finally:
        gc.freeze()
        gc.set_threshold(10_000)
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Nor does one look through what earlier files have left: modules that they imported, models that they share.

    Nor do torch's threads stay as many as a test's server chose: later tests of models would take five times as long.
    """
    torch = sys.modules.get("torch")
    num_threads = torch.get_num_threads() if torch else 0
    try:
        return (yield)
    finally:
        if torch:
            torch.set_num_threads(num_threads)
        if nextitem is None or nextitem.path != item.path:
            gc.collect()
            gc.freeze()


class FileScheduling(LoadFileScheduling):
    """Gives a worker whole files, and one worker all that are FORKING."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return FORKING[0] if file.removeprefix(f"{TESTS.name}/") in FORKING else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileScheduling | None:
    return FileScheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let files of few tests, which mostly wait for processes and networks, and files of many, which compute, alternate
    where workers share them: else all would compute first and all wait afterwards. The LONGEST begin first: else one
    worker would be left alone with one of them in the end."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    ranks = {TESTS / name: rank for rank, name in enumerate(LONGEST)}
    assert all((TESTS / name).is_file() for name in (*LONGEST, *FORKING)), "one of these files has another name now"
    # and by path: each worker has collected them in another order
    ordered = sorted(files.items(), key=lambda file: (ranks.get(file[0], len(ranks)), len(file[1]), file[0]))
    by_size = [tests for _, tests in ordered]
    alternating = [by_size.pop(-1 if index % 2 else 0) for index in range(len(by_size))]
    items[:] = [item for tests in alternating for item in tests]


def share_compilation(config: pytest.Config, worker: int, num_workers: int) -> None:
    """Let each worker collect the whole suite from another file on: after a clone, all would compile the same files at
    the same time, and now each finds compiled what the others began with."""
    if config.option.markexpr == DEFAULT_MARKS and [Path(name).resolve() for name in config.args] == [TESTS]:
        files = sorted(
            str(path) for path in TESTS.rglob("test_*.py") if path.relative_to(TESTS).parts[0] not in OPTIONAL
        )
        first = worker * len(files) // num_workers
        config.args[:] = files[first:] + files[:first]


def let_libraries_log_through_the_root() -> None:
    """Pytest attaches its two handlers, three times a test, to each logger whose records do not reach the root's: those
    of torch are forty."""
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == "torch":
            logger.propagate = True


def compile_once() -> None:
    """Fill numba's cache while no test runs yet: after a clone, each node that starts meanwhile would compile anew."""
    from swarm.serving.model import fused_decode  # noqa: PLC0415 - imports torch
    from swarm_compression import warm_up  # noqa: PLC0415

    warm_up()
    fused_decode.kernels()
