"""Everything that the documents name exists: commands, flags, modules, files, classes, metrics, events, messages of
errors.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import typer
from support.deploy_commands import PEER_ID, config_of, shell_commands
from support.site_pages import ROOT, written
from swarm_node import cli
from swarm_node.events.emitter import EVENTS
from swarm_node.metrics.metric_contract import METRICS

PAGES = {
    path: text for path, text in written().items() if path not in ("reference/events.md", "reference/metrics.md")
} | {name: (ROOT / name).read_text("utf-8") for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")}
ADDR = f"/ip4/203.0.113.7/tcp/4001/p2p/{PEER_ID}"
FOLDERS = {
    "swarm": "swarm/swarm",
    "swarm_node": "node/swarm_node",
    "swarm_protocol": "protocol/swarm_protocol",
    "swarm_compression": "compression/swarm_compression",
}
MESSAGES = re.findall(r"^### (?:Unknown )?`(.+)`$", PAGES["guides/troubleshooting.md"], flags=re.MULTILINE)
# options and classes of other programs that the documents name, and a file that is yet to be written
OTHERS = {"--all", "--cpu-durations", "--hypothesis-profile"}
OTHERS_CLASSES = {"PublicKey", "PrivateKey"}
UNWRITTEN = {"build/diloco.svg"}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE)


def spans(text: str) -> list[str]:
    """Return the inline code of a page."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def commands() -> list[tuple[str, ...]]:
    """Return each command that a page shows. ADDR and the like stand for the reader's own values."""
    found = set()
    for text in PAGES.values():
        script = "\n".join((*blocks(text, "sh"), *spans(text))).replace("ADDR", ADDR)
        script = re.sub(r"\b(?:MODEL|OWNER/NAME(?:\[@REVISION\])?)(?= |$)", "OWNER/NAME", script, flags=re.MULTILINE)
        found |= {tuple(words) for words in shell_commands(script)}
    return sorted(found)


def test_commands_in_documents_exist() -> None:
    found = commands()
    assert len(found) > 50
    for words in found:
        try:
            config_of(words)
        except Exception as error:
            raise AssertionError(" ".join(words)) from error


@cache
def flags() -> set[str]:
    def options(command: Any) -> Iterator[str]:
        for parameter in command.params:
            yield from (*parameter.opts, *parameter.secondary_opts)
        for each in getattr(command, "commands", {}).values():
            yield from options(each)

    return {*options(typer.main.get_command(cli.app)), "--help"}


def lost(named: Callable[[str], set[str]], existing: Callable[[str], bool]) -> dict[str, set[str]]:
    """Return by page the names that do not exist. Fails if no page names anything."""
    by_page = {page: named(text) for page, text in PAGES.items()}
    assert any(by_page.values())
    missing = {page: {name for name in names if not existing(name)} for page, names in by_page.items()}
    return {page: names for page, names in missing.items() if names}


def test_flags_in_documents_exist() -> None:
    def told(text: str) -> set[str]:
        return {flag for span in spans(text) for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", span)} - OTHERS

    assert lost(told, flags().__contains__) == {}


def test_python_in_documents_parses_and_imports_what_exists() -> None:
    assert (
        lost(lambda text: {name for each in blocks(text, "python") for name in imported(ast.parse(each))}, resolves)
        == {}
    )


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def resolves(dotted: str) -> bool:
    """Return whether a name is a module of ours, or something in one.

    It is looked up in the sources, since importing takes seconds.
    """
    package, *parts = dotted.split(".")
    if package not in FOLDERS:
        return True  # other projects' packages
    for end in range(len(parts), -1, -1):
        path = "/".join((FOLDERS[package], *parts[:end]))
        for source in (f"{path}.py", f"{path}/__init__.py"):
            if source in files():
                text = (ROOT / source).read_text("utf-8")
                return all(re.search(rf"\b{name}\b", text) for name in parts[end:])
    return False


def test_modules_and_files_in_documents_exist() -> None:
    def told(pattern: str) -> Callable[[str], set[str]]:
        return lambda text: {span for span in spans(text) if re.fullmatch(pattern, span)}

    assert lost(told(rf"(?:{'|'.join(FOLDERS)})(?:\.\w+)+"), resolves) == {}
    assert lost(told(r"[\w./-]+\.(?:py|proto|svg|sh|yaml)"), is_file) == {}
    unknown = lost(told(r"[a-z0-9]+(?:_[a-z0-9]+)+"), stems().__contains__)
    assert {page: names for page, names in unknown.items() if page.startswith("decisions/")} == {}


@cache
def files() -> frozenset[str]:
    folders = ("node", "swarm", "protocol", "compression", "tests", "docs", "deploy")
    return frozenset(path.relative_to(ROOT).as_posix() for folder in folders for path in (ROOT / folder).rglob("*.*"))


@cache
def stems() -> frozenset[str]:
    return frozenset(name.rsplit("/", 1)[-1].removesuffix(".py") for name in files())


def is_file(name: str) -> bool:
    """Return whether the name is the end of some file's path, since pages may shorten paths."""
    return name in UNWRITTEN or any(f"/{each}".endswith(f"/{name}") for each in files())


@cache
def sources() -> tuple[str, ...]:
    return tuple((ROOT / name).read_text("utf-8") for name in files() if name.endswith((".py", ".proto")))


@cache
def classes() -> frozenset[str]:
    return frozenset(
        name for text in sources() for name in re.findall(r"^\s*(?:class|message) (\w+)", text, re.MULTILINE)
    )


def test_classes_in_documents_exist() -> None:
    def told(pattern: str) -> Callable[[str], set[str]]:
        return lambda text: {span for span in spans(text) if re.fullmatch(pattern, span)} - OTHERS_CLASSES

    assert lost(told(r"(?:[A-Z][a-z0-9]+){2,}"), classes().__contains__) == {}
    assert lost(told(r"[A-Z][A-Za-z]+\.[a-z_]+"), lambda span: has_method(*span.split("."))) == {}


def has_method(kind: str, method: str) -> bool:
    return any(f"def {method}(" in text for text in sources_by_class().get(kind, ()))


@cache
def sources_by_class() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for text in sources():
        for kind in re.findall(r"^class (\w+)", text, re.MULTILINE):
            found.setdefault(kind, []).append(text)
    return found


def test_metrics_and_events_in_documents_are_in_their_contracts() -> None:
    def metrics(text: str) -> set[str]:
        return {span for span in spans(text) if re.fullmatch(r"swarm_[a-z_]+", span)} - set(FOLDERS)

    def events(text: str) -> set[str]:
        return {name for pair in re.findall(r"`(\w+)` event\b|\bevent `(\w+)`", text) for name in pair if name}

    assert lost(metrics, METRICS.__contains__) == {}
    assert lost(events, EVENTS.__contains__) == {}


@cache
def texts() -> tuple[str, ...]:
    """Return all texts in the program, joined if they form one message, with `…` for the parts that are filled in."""
    found = []
    for name in files():
        source = (ROOT / name).read_text("utf-8") if name.endswith(".py") and not name.startswith("tests/") else ""
        if any(word in source for word in ("Error", "Refused", "reason")):
            tree = ast.parse(source)
            found += [joined(node) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr | ast.Constant)]
    return tuple(text for text in found if text)


def joined(node: ast.JoinedStr | ast.Constant) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)


def test_messages_in_troubleshooting_exist() -> None:
    def is_told(message: str) -> bool:
        pieces = [re.escape(piece.strip(" .;:")) for piece in message.split("…") if piece.strip(" .;:(s)")]
        pattern = re.compile(".*".join(pieces))
        return any(pattern.search(text) for text in texts())

    assert [message for message in MESSAGES if not is_told(message)] == []


def test_troubleshooting_has_the_thirty_commonest_messages() -> None:
    assert len(MESSAGES) >= 30


def test_site_has_every_page_in_its_menu() -> None:
    """`make docs` says the same, and finds broken links; a new page is most easily forgotten here."""
    menu = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:\n")[1])
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= set(menu), "name the new page under nav in mkdocs.yml"
