"""Rules for docstrings: large classes have one, a function's begins with a verb, none is a fragment, and names in them
exist. All tests are in one file, since parsing the whole program takes seconds.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
from support.site_pages import ROOT
from swarm.heap import uncollected

PACKAGES = ("node/swarm_node", "swarm/swarm", "protocol/swarm_protocol", "compression/swarm_compression")
MAX_METHODS_WITHOUT_DOCSTRING = 5
# a docstring that begins so is a fragment, or describes something else than what the function does
NO_VERB = re.compile(
    r"[^A-Z]|(?:The|A|An|It|Its|This|That|Those|These|There|One|All|Each|Every|No|None|Nothing|Our|Two|Three|While|Why|"
    r"Who|Whether|What|Where|When|Of|Until|Through|As|Everyone|Seconds|Milliseconds|Bytes|Number|Blocks|Idempotent)\b"
)
NO_SUBJECT = re.compile(r"(?:Of|Who|Whom|Whoever|Until|As|Through|Whether|Nobody)\b")
"""The first words of docstrings that have neither subject nor verb."""
NO_SENTENCE = re.compile(r"(?:What|How|When|Where)\b(?!.* (?:cannot be done|breaks the protocol|was not taken)[.;])")
"""Docstrings that begin so are half a question, but for three whose subject begins with "What"."""
NOT_THESE = {"property", "cached_property", "setter", "computed_field"}
"""Decorators of what is no function to its caller."""
NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
# names of other programs and of formulas, and a variable of the environment, which no code of ours spells
OTHERS = {"torch.set_flush_denormal", "Tensor.to_mkldnn", "save_file", "div.rn", "fma", "SQLITE_BUSY_SNAPSHOT"}
OTHERS |= {"SWARM_KEY", "alpha", "e"}
TEXTS_OF_HELP = "node/swarm_node/settings/config.py"
"""The module whose docstrings are the help of settings."""
TEXTS_OF_HTTP = {"node/swarm_node/dashboard/api.py", "node/swarm_node/gateway/app.py"}
"""Modules whose docstrings are what the HTTP interface's description says of each path."""


@cache
def modules() -> dict[str, ast.Module]:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    with uncollected():  # the trees stay, and are a million objects
        return {
            path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8"))
            for path in paths
            if not path.name.endswith("_pb2.py")
        }


@cache
def nodes(module: ast.Module) -> tuple[ast.AST, ...]:
    """Return every node of a module. Finding them takes longer than any test's work with them."""
    return tuple(ast.walk(module))


def silent_classes(module: ast.Module) -> Iterator[str]:
    for node in nodes(module):
        if isinstance(node, ast.ClassDef) and ast.get_docstring(node) is None:
            num_methods = sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
            if num_methods > MAX_METHODS_WITHOUT_DOCSTRING:
                yield node.name


def fragments(module: ast.Module) -> Iterator[str]:
    for node in nodes(module):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        decorators = {name for each in node.decorator_list for name in re.findall(r"\w+", ast.unparse(each))}
        if node.name == "__init__" or decorators & NOT_THESE:
            continue
        if (text := ast.get_docstring(node)) and NO_VERB.match(text):
            yield f"{node.name}: {text.splitlines()[0]}"


def texts(module: ast.Module) -> Iterator[str]:
    """Yield the docstrings of a module: its own, and those of its classes, functions and constants."""
    for node in nodes(module):
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
    found = [f"{path}: {text}" for path, module in modules().items() for text in texts(module)]
    for path in sorted((ROOT / "tests").rglob("*.py")):
        # read as text, since parsing them would take as long as parsing the program
        begun = re.findall(r'^ *"""(?=\w)(.*)', path.read_text("utf-8"), flags=re.MULTILINE)
        found += [f"{path.relative_to(ROOT).as_posix()}: {text}" for text in begun]
    assert len(found) > 3000
    code = {path: module for path, module in modules().items() if path != TEXTS_OF_HELP}
    assert [
        f"{path}: {each}" for path, module in code.items() for each in texts(module) if NO_SENTENCE.match(each)
    ] == []
    assert [text for text in found if NO_SUBJECT.match(text.split(": ", 1)[1])] == []


@pytest.mark.parametrize("text", ["The next one, or None.", "Those of it.", "`text` as TOML.", "[K] and codes [N]."])
def test_fragment_is_noticed(text: str) -> None:
    assert list(fragments(ast.parse(f'def f() -> None:\n    """{text}"""\n'))) == [f"f: {text}"]
    assert not list(fragments(ast.parse(f'def f() -> None:\n    """Return {text}"""\n')))


def test_silent_class_is_noticed() -> None:
    methods = "".join(f"    def f{number}(self) -> None: ...\n" for number in range(6))
    assert list(silent_classes(ast.parse(f"class A:\n{methods}"))) == ["A"]
    assert not list(silent_classes(ast.parse(f'class A:\n    """An A."""\n{methods}')))


# --- names between backquotes ---


class Source:
    """The names and words in one module: `docstrings`, those of constants too; `words`, all names in its code and the
    words in its texts; `variables`, the names that may stand for something else than a module.
    """

    def __init__(self, module: ast.Module) -> None:
        self.docstrings = list[str]()
        self.words, self.variables = set[str](), set[str]()
        told = set[int]()
        for node in nodes(module):
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
    return {path: Source(module) for path, module in modules().items()}


@cache
def words_in() -> dict[str, set[str]]:
    """Return the words that may follow the name of each module or package: those of the modules with that name, and of
    those inside.
    """
    found = dict[str, set[str]]()
    for path, source in sources().items():
        *_, name = names = path.removesuffix("/__init__.py").removesuffix(".py").split("/")[1:]
        for each in names:
            found.setdefault(each, set()).update((name, *source.words))
    return found


@cache
def known() -> tuple[frozenset[str], frozenset[str]]:
    """Return all words, and all variables."""
    words = set(words_in()).union(*(source.words for source in sources().values()))
    return frozenset(words), frozenset().union(*(source.variables for source in sources().values()))


def exists(name: str) -> bool:
    """Return whether code spells each of the name's parts: those after a module's name in that module."""
    words, variables = known()
    inside: frozenset[str] | set[str] = words
    for part in name.split("."):
        if part not in inside:
            return False
        inside = words if part in variables else words_in().get(part, words)
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


def test_no_two_classes_have_one_name_and_modules_only_with_the_same_role() -> None:
    product = {path: module for path, module in modules().items() if not path.startswith("tests/")}
    assert len(product) > 400
    classes = Counter(
        node.name for module in product.values() for node in nodes(module) if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, times in classes.items() if times > 1]
    files = Counter(path.rpartition("/")[2] for path in product)
    assert {name for name, times in files.items() if times > 1} <= {"__init__.py", "app.py", "command.py"}
