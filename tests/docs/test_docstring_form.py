"""What docstrings look like: large classes have one, that of a function begins with a verb, and none is a fragment."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest
from support.site_pages import ROOT

PACKAGES = ("node/swarm_node", "swarm/swarm", "protocol/swarm_protocol", "compression/swarm_compression")
MAX_METHODS_WITHOUT_DOCSTRING = 5
# a docstring that begins so is a fragment, or tells of something else than what the function does
NO_VERB = re.compile(
    r"[^A-Z]|(?:The|A|An|It|Its|This|That|Those|These|There|One|All|Each|Every|No|None|Nothing|Our|Two|Three|While|Why|"
    r"Who|Whether|What|Where|When|Of|Until|Through|As|Everyone|Seconds|Milliseconds|Bytes|Number|Blocks|Idempotent)\b"
)
NO_SUBJECT = re.compile(r"(?:Of|Who|Whom|Whoever|Until|As|Through|Whether|Nobody)\b")
"""The first words of docstrings that have neither subject nor verb."""
NOT_THESE = {"property", "cached_property", "setter", "computed_field"}
"""Decorators of what is no function to its caller."""
TEXTS_OF_HTTP = {"node/swarm_node/dashboard/api.py", "node/swarm_node/gateway/app.py"}
"""Modules whose docstrings are what the HTTP interface's description says of each path."""


@cache
def modules() -> dict[str, ast.Module]:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8"))
        for path in paths
        if not path.name.endswith("_pb2.py")
    }


def silent_classes(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef) and ast.get_docstring(node) is None:
            num_methods = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
            if num_methods > MAX_METHODS_WITHOUT_DOCSTRING:
                yield node.name


def fragments(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        decorators = {name for each in node.decorator_list for name in re.findall(r"\w+", ast.unparse(each))}
        if node.name == "__init__" or decorators & NOT_THESE:
            continue
        if (text := ast.get_docstring(node)) and NO_VERB.match(text):
            yield f"{node.name}: {text.splitlines()[0]}"


def texts(module: ast.Module) -> Iterator[str]:
    """Yield the docstrings of a module: its own, and those of its classes, functions and constants."""
    for node in ast.walk(module):
        body = getattr(node, "body", None)
        for each in body if isinstance(body, list) else []:
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                yield each.value.value


def test_classes_with_many_methods_say_what_they_are() -> None:
    assert [f"{path}: {name}" for path, module in modules().items() for name in silent_classes(module)] == []


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    ours = {path: module for path, module in modules().items() if path not in TEXTS_OF_HTTP}
    assert [f"{path}: {found}" for path, module in ours.items() for found in fragments(module)] == []


def test_no_docstring_of_code_or_tests_is_a_fragment() -> None:
    tests = {path.as_posix(): ast.parse(path.read_text("utf-8")) for path in sorted((ROOT / "tests").rglob("*.py"))}
    found = [f"{path}: {text}" for path, module in (modules() | tests).items() for text in texts(module)]
    assert len(found) > 2000
    assert [text for text in found if NO_SUBJECT.match(text.split(": ", 1)[1])] == []


@pytest.mark.parametrize("text", ["The next one, or None.", "Those of it.", "`text` as TOML.", "[K] and codes [N]."])
def test_fragment_is_noticed(text: str) -> None:
    assert list(fragments(ast.parse(f'def f() -> None:\n    """{text}"""\n'))) == [f"f: {text}"]
    assert not list(fragments(ast.parse(f'def f() -> None:\n    """Return {text}"""\n')))


def test_silent_class_is_noticed() -> None:
    methods = "".join(f"    def f{number}(self) -> None: ...\n" for number in range(6))
    assert list(silent_classes(ast.parse(f"class A:\n{methods}"))) == ["A"]
    assert not list(silent_classes(ast.parse(f'class A:\n    """An A."""\n{methods}')))
