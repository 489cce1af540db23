"""Pages of the site that are made from the code each time it is built, so that they cannot fall behind it.

MkDocs calls `on_files`, `on_page_content` and `on_post_page` (see `hooks` in mkdocs.yml). The pages of events and
metrics have generators of their own, because they are read in the repository as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_file import template
from swarm_node import cli
from swarm_node.commands.help_text import divide
from swarm_node.commands.run import DEFAULT_NAME
from swarm_node.settings.config import SETTINGS, default_text
from swarm_node.settings.config_sources import ENV_PREFIX
from swarm_protocol import limits

LIMITS = "reference/protocol/limits.md"
COMMANDS = "reference/cli.md"
SETTINGS_PAGE = "reference/settings.md"
RUN_FILE = "reference/run-file.md"

BROKEN = re.compile(r">[^<]*!\[[^<]*<")
"""A picture that is shown as its source, as where its description holds a bracket."""

UNRESOLVED = re.compile(r"""<a [^>]*href="(?![a-z]+:)[^"]*\.md["#]""")
"""A link to a page's source, which is no page of the site."""

FETCHED = re.compile(r"""\ssrc=["']?https?:|<link[^>]+rel=["']?stylesheet[^>]+https?:|class=["']?mermaid""")
"""What makes a reader's browser ask another site: a script, picture or style from there, or Mermaid, which Material
loads from a content delivery network."""

BREAKABLE = re.compile(r"(?<=\w)([/._])(?=\w{3})")
"""The signs after which a long name may be broken, except before a short end, such as `.py` or `_S`."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {LIMITS: limits_page, COMMANDS: commands_page, SETTINGS_PAGE: settings_page, RUN_FILE: run_file_page}
    for path, page in pages.items():
        files.append(File.generated(config, path, content=page()))
    return files


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Resolve the links of files of the repository's root, such as CONTRIBUTING.md, that pages in a folder include."""
    return re.sub(r'href="docs/([^"#]+)\.md', r'href="../\1.html', html)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:  # noqa: ARG001
    """Refuse a page that would fetch something from another site, or whose picture or link is not one."""
    kinds = {"fetches from elsewhere": FETCHED, "has a picture that is none": BROKEN, "links to no page": UNRESOLVED}
    for what, pattern in kinds.items():
        if found := pattern.search(output):
            raise PluginError(f"{page.file.src_uri} {what}: {output[found.start() : found.end() + 60]!r}")
    return breakable(output)


def breakable(html: str) -> str:
    """Let long names in a table's cells break after a slash, a dot or an underscore: in a narrow column the browser
    would break them anywhere.
    """

    def cell(match: re.Match[str]) -> str:
        return re.sub(r"<code>[^<]+</code>", lambda code: BREAKABLE.sub(r"\1<wbr>", code[0]), match[0])

    return re.sub(r"<td\b.*?</td>", cell, html, flags=re.DOTALL)


def limits_page() -> str:
    """Every constant of `limits.py` with its value and the comment above it."""
    source = Path(limits.__file__).read_text(encoding="utf-8")
    parts = [
        "# Limits\n",
        "Every limit on what crosses the network, with its reason. A message, stream or record beyond one of these is",
        "refused. Raising a limit needs a new protocol version. This page is made from",
        "`protocol/swarm_protocol/limits.py`.\n",
    ]
    comment: list[str] = []
    is_used = False  # what follows one limit is about the next; limits without a comment share the one before
    for line in source.splitlines():
        if heading := re.fullmatch(r"# --- (.*?) -+", line):
            title = heading[1][0].upper() + heading[1][1:]
            parts += [f"\n## {title}\n", "| limit | value | reason |", "|---|---|---|"]
            comment = []
        elif line.startswith("# "):
            comment = [line[2:]] if is_used else [*comment, line[2:]]
            is_used = False
        elif assigned := re.match(r"([A-Z_]+) = ", line):
            value = getattr(limits, assigned[1])
            parts.append(_row(f"`{assigned[1]}`", _number(value), " ".join(comment)))
            is_used = True
    return "\n".join(parts) + "\n"


def commands_page() -> str:
    """Every command with its arguments, options and example, as `--help` has them."""
    parts = [
        "# Commands\n",
        "Every command has `--help`. Options that are settings can also be given in `config.toml` or in the",
        "environment: see [Settings](settings.md). Exit codes: 0 success, 1 failure, 2 wrong usage, 70 a bug,",
        "130 interrupted. This page is made from the program.\n",
    ]
    for name, command in _commands(typer.main.get_command(cli.app)):
        arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
        words = " ".join(["swarm-node", name, *(argument.metavar for argument in arguments), "[OPTIONS]"])
        parts += [f"\n## {name}\n", f"{command.help}\n", f"```text\n{words}\n```\n"]
        parts += [f"`{argument.metavar.strip('[]')}`: {argument.help}\n" for argument in arguments]
        for title, options in divide(command.params).items():
            parts += [f"\n{title}:\n", "| option | value | meaning |", "|---|---|---|"]
            parts += [
                _row(_flags(option), f"`{option.metavar}`" if option.metavar else "", option.help) for option in options
            ]
        example = command.epilog.removeprefix("Example: ")
        parts.append(f"\nExample:\n\n```sh\n{example}\n```")
    return "\n".join(parts) + "\n"


def settings_page() -> str:
    """Every setting under its three names."""
    parts = [
        "# Settings\n",
        "A setting can be given in `config.toml` in the node's home (or the file that `--config` or `SWARM_CONFIG`",
        "names), in the environment, or as an option. Later ones win, in this order. An unknown name is an error.",
        "Lists are TOML lists in the file, and separated by commas or spaces elsewhere. For every limit, 0 is no",
        "limit. An empty value is an error; an empty variable counts as unset. This page is made from the program.\n",
        "| in the file | in the environment | option | default | meaning |",
        "|---|---|---|---|---|",
    ]
    for name, setting in SETTINGS.items():
        in_file = _code("" if name == "home" else name)
        flag = f"--{name.replace('_', '-')}"
        names = (in_file, _code(ENV_PREFIX + name.upper()), _code(flag), _code(default_text(name)))
        parts.append(_row(*names, setting.about))
    return "\n".join(parts) + "\n"


def run_file_page() -> str:
    """The file that `run init` writes, which explains every setting."""
    return f"""# Run file

What is trained, on what, and how. A run file is TOML; its author [signs](protocol/identity.md#run-files) it.
Settings of one member only, such as its devices, are in [Settings](settings.md). This is the file that
`swarm-node run init` writes:

```toml
{template(RunConfig(name=DEFAULT_NAME), "run.toml")}```
"""


def _commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def _flags(option: Any) -> str:
    return "<br>".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))


def _code(text: str | None) -> str:
    return f"`{text}`" if text else ""


def _row(*cells: str) -> str:
    return "| " + " | ".join(_plain(cells)) + " |"


def _plain(cells: Iterable[str]) -> Iterator[str]:
    """Cells that neither end early nor hold what is taken for HTML."""
    for cell in cells:
        # what is in backquotes is shown as it is, a backslash too
        yield cell if cell.startswith("`") else cell.replace("|", "\\|").replace("<peer_id>", "&lt;peer_id&gt;")


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}"
