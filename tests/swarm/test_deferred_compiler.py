from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from swarm.deferred_compiler import defer_compiler

from swarm import deferred_compiler

REAL = """
from made_up._dynamo.utils import COUNTERS

def disable(fn):
    return "disabled"

def optimize():
    return "optimized"
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A library with a compiler, where torch's would be, and nothing deferred yet."""
    compiler = tmp_path / "made_up" / "_dynamo"
    compiler.mkdir(parents=True)
    (compiler.parent / "__init__.py").touch()
    (compiler / "__init__.py").write_text(REAL)
    (compiler / "alone.py").write_text("NUMBER = 3")
    (compiler / "config.py").write_text("NUMBER = 4")
    (compiler / "rare.py").write_text("NUMBER = 5")
    # in a cycle with the compiler, as most of torch's modules are
    (compiler / "utils.py").write_text("from . import config\nCOUNTERS = []")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(deferred_compiler, "COMPILER", "made_up._dynamo")
    monkeypatch.setattr(deferred_compiler, "ALONE", "alone")
    finders = [each for each in sys.meta_path if not isinstance(each, deferred_compiler._Finder)]
    monkeypatch.setattr(sys, "meta_path", finders)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "made_up"]:
        del sys.modules[name]


@pytest.mark.usefixtures("library")
def test_decorators_and_single_modules_leave_the_compiler_out() -> None:
    defer_compiler()
    defer_compiler()
    assert len([each for each in sys.meta_path if isinstance(each, deferred_compiler._Finder)]) == 1
    compiler = importlib.import_module("made_up._dynamo")
    assert [compiler.disable(len), compiler.disable(reason="none")(len)] == [len, len]
    assert [compiler.allow_in_graph(len), compiler.assume_constant_result(len)] == [len, len]
    assert importlib.import_module("made_up._dynamo.alone").NUMBER == 3
    assert importlib.import_module("made_up._dynamo") is compiler


@pytest.mark.usefixtures("library")
def test_whoever_compiles_gets_the_compiler() -> None:
    defer_compiler()
    stand_in = importlib.import_module("made_up._dynamo")
    assert stand_in.optimize() == "optimized"
    compiler = importlib.import_module("made_up._dynamo")
    assert compiler.disable(len) == "disabled"
    assert sys.modules["made_up"]._dynamo is compiler
    assert stand_in.optimize is compiler.optimize
    with pytest.raises(AttributeError):
        _ = stand_in.unknown


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("name", ["utils", "config", "rare"])
def test_whoever_imports_another_module_of_the_compiler_gets_it_with_the_compiler(name: str) -> None:
    defer_compiler()
    importlib.import_module("made_up._dynamo")
    module = importlib.import_module(f"made_up._dynamo.{name}")
    compiler = importlib.import_module("made_up._dynamo")
    assert compiler.optimize() == "optimized"
    assert getattr(compiler, name) is sys.modules[f"made_up._dynamo.{name}"] is module
    assert Path(importlib.util.find_spec(module.__name__).origin).name == f"{name}.py"  # type: ignore[union-attr, arg-type]


@pytest.mark.usefixtures("library")
def test_compiler_that_is_there_already_stays() -> None:
    compiler = importlib.import_module("made_up._dynamo")
    defer_compiler()
    assert importlib.import_module("made_up._dynamo") is compiler
    assert not any(isinstance(each, deferred_compiler._Finder) for each in sys.meta_path)
