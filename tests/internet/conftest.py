"""Provides the lab for tests, and checks that nothing of it is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
from bench.report import Report
from internet import namespaces
from internet.lab import Lab, remove_abandoned
from internet.lab_nodes import LabNodes, lab_nodes
from support.tiny_models import FAMILIES, write_model

MakeLab = Callable[[], Lab]
OpenLab = Callable[[], AbstractContextManager[LabNodes]]


@pytest.fixture(scope="session")
def make_lab() -> MakeLab:
    """Build a lab. Tests are skipped where this process may not make network namespaces."""
    try:
        namespaces.check_available()
    except namespaces.Unavailable as unavailable:
        pytest.skip(str(unavailable))
    remove_abandoned()
    return Lab


@contextmanager
def built_lab(make_lab: MakeLab) -> Iterator[Lab]:
    """Yield a separate lab for one test, and remove it afterwards even if the test fails."""
    lab = make_lab()
    try:
        lab.build()
        yield lab
    finally:
        lab.remove()
    assert namespaces.named(f"{lab.namespace('')}.*") == []


@pytest.fixture
def lab(make_lab: MakeLab) -> Iterator[Lab]:
    with built_lab(make_lab) as lab:
        yield lab


@pytest.fixture
def nodes(lab: Lab, tmp_path: Path) -> Iterator[LabNodes]:
    with lab_nodes(lab, tmp_path) as nodes:
        yield nodes


@pytest.fixture(scope="session")
def open_lab(make_lab: MakeLab, tmp_path_factory: pytest.TempPathFactory) -> OpenLab:
    """Yield labs for fixtures that outlast a test but need a lab only while they measure."""

    @contextmanager
    def opened() -> Iterator[LabNodes]:
        with ExitStack() as stack:
            lab = stack.enter_context(built_lab(make_lab))
            yield stack.enter_context(lab_nodes(lab, tmp_path_factory.mktemp("lab")))

    return opened


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", FAMILIES["llama"]())


@pytest.fixture(scope="session")
def figures() -> Iterator[Report]:
    """Collect measured figures. They are shown at the end (with -s) and appended to build/bench.jsonl."""
    report = Report("tests/internet")
    yield report
    if report.rows:
        report.show()
