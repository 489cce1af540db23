"""What docstrings name between backquotes exists: classes, modules, and names in them."""

from __future__ import annotations

import ast
import re
from functools import cache

from support.site_pages import ROOT

PACKAGES = ("node/swarm_node", "swarm/swarm", "protocol/swarm_protocol", "compression/swarm_compression")
NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
# names of other programs and of formulas, and a variable of the environment, which no code of ours spells
OTHERS = {"torch.set_flush_denormal", "Tensor.to_mkldnn", "save_file", "div.rn", "fma", "SQLITE_BUSY_SNAPSHOT"}
OTHERS |= {"SWARM_KEY", "alpha", "e"}


class Source:
    """What one module spells: `docstrings`, those of constants too; `words`, all names in its code and the words in its
    texts; `variables`, those of the names that may stand for something else than a module."""

    def __init__(self, text: str) -> None:
        self.docstrings = list[str]()
        self.words, self.variables = set[str](), set[str]()
        told = set[int]()
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Expr(value=ast.Constant(value=str(docstring)) as constant):
                    self.docstrings.append(docstring)
                    told.add(id(constant))
                case ast.Constant(value=str(value)) if id(node) not in told:
                    self.words.update(re.findall(r"\w+", value))
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.Attribute(attr=name):
                    self.variables.add(name)
                case ast.Name(id=name) | ast.ClassDef(name=name):
                    self.words.add(name)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.keyword(arg=str(name)):
                    self.words.add(name)
                case ast.ImportFrom(module=str(module), names=aliases):
                    self.words.update(module.split("."), (alias.name for alias in aliases))
                case ast.Import(names=aliases):
                    self.words.update(part for alias in aliases for part in alias.name.split("."))
        self.words |= self.variables


@cache
def sources() -> dict[str, Source]:
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): Source(path.read_text("utf-8")) for path in paths}


@cache
def modules() -> dict[str, set[str]]:
    """What may follow the name of each module or package: the words of those with that name, and of what is in them."""
    found = dict[str, set[str]]()
    for path, source in sources().items():
        *_, name = names = path.removesuffix("/__init__.py").removesuffix(".py").split("/")[1:]
        for each in names:
            found.setdefault(each, set()).update((name, *source.words))
    return found


@cache
def known() -> tuple[frozenset[str], frozenset[str]]:
    """All words, and all variables."""
    words = set(modules()).union(*(source.words for source in sources().values()))
    return frozenset(words), frozenset().union(*(source.variables for source in sources().values()))


def exists(name: str) -> bool:
    """Return whether code spells each of the name's parts: those after a module's name in that module."""
    words, variables = known()
    inside: frozenset[str] | set[str] = words
    for part in name.split("."):
        if part not in inside:
            return False
        inside = words if part in variables else modules().get(part, words)
    return True


def test_docstring_names_exist() -> None:
    lost = [
        f"{path}: {name}"
        for path, source in sources().items()
        for text in source.docstrings
        for name in re.findall(r"`([^`\n]+)`", text)
        if NAME.fullmatch(name) and name not in OTHERS and not exists(name)
    ]
    assert lost == []
