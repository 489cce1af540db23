"""Makes command-line options from settings, so that each is named, described and parsed in one place.

A command lists the settings that it takes. typer sees an ordinary signature, and the command receives the values as
`Flags`. After `--run` and `--model` a shell completes run files and model directories in the directory typed so far; if
there are none, it completes any path, as for other options.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from swarm_protocol.errors import ConfigError
from swarm_protocol.identity import Identity

from swarm_node.commands.help_text import HelpfulCommand
from swarm_node.settings import config_sources
from swarm_node.settings.config import SETTINGS, Config, UsageError, Value, default_text
from swarm_node.settings.parsers import RUN_ID_FORM, HubId, RunId, parse_run
from swarm_node.storage.home import Home

if TYPE_CHECKING:
    from swarm_node.events.emitter import Emitter

T = TypeVar("T")

MAX_OFFERED = 200
DEFAULT_PATH = Path("run.toml")
"""The run file that commands use by default."""


def run_files(incomplete: str) -> list[str]:
    return _offered(incomplete, lambda path: path.suffix == ".toml" and path.is_file())


def models(incomplete: str) -> list[str]:
    return _offered(incomplete, lambda path: (path / "config.json").is_file())


COMPLETIONS: Mapping[str, Callable[[str], list[str]]] = {"run": run_files, "model": models}
"""The function that completes a setting's value, by the setting's name."""


def _offered(incomplete: str, fits: Callable[[Path], bool]) -> list[str]:
    """Return the paths that complete `incomplete`. `~/` and relative paths stay as they were typed."""
    above, slash, begun = incomplete.rpartition("/")
    try:
        entries = sorted(Path(above + slash or ".").expanduser().iterdir())
        found = [entry.name for entry in entries if entry.name.startswith(begun) and fits(entry)]
    except (OSError, RuntimeError):  # the directory does not exist, or ~NAME names no user
        return []
    return [f"{above}{slash}{name}" for name in found[:MAX_OFFERED]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """Holds the values given on the command line. None marks a value that was not given.

    `options` holds the options and arguments that are not settings, by name: switches as bool, files as Path,
    everything else as str.
    """

    values: Mapping[str, Value]
    json: bool
    file: Path | None
    options: Mapping[str, Any] = field(default_factory=dict)

    def resolve(self) -> Config:
        """Resolve the settings from these flags, the environment and the settings file. Raises ConfigError."""
        return config_sources.resolve(self.values, file=self.file)

    def member(self) -> Config:
        """Resolve the settings of a command that joins a network, with the home's invitation. Raises ConfigError."""
        from swarm_node.storage.kept_invitation import with_invitation  # noqa: PLC0415 - the network's code

        return with_invitation(self.resolve())

    def needed(self, name: str, remedy: str) -> Any:
        """Return the positional argument `name`. Raises UsageError if it is missing."""
        if not (given := self.options[name]):
            raise UsageError(f"{name.upper()} is missing", remedy=remedy)
        return given

    def parsed(self, name: str, parse: Callable[[str], T], remedy: str) -> T | None:
        """Return the option `name` parsed by `parse`, or None if it was not given. Raises UsageError."""
        text: str | None = self.options[name]
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            raise UsageError(f"--{name.replace('_', '-')}: {text!r:.80} {error}", remedy=remedy) from error

    def home(self) -> Path:
        """Return the home directory, for a command that needs no other setting. Raises ConfigError."""
        return config_sources.resolve_home(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command: its line in the help, its code (`module:function`, imported when it runs) and its options.

    `settings` names the settings that the command takes, and `about` has the help texts of those that mean something
    else here. `options` maps its other options to their help texts: `--yes`
    is a switch, `--out DIR` and `--identity FILE` are paths, `--step STEP` is text, and `--serial SERIAL…` may be
    repeated. `PATH`, `DIR`, `MODEL` and `SERIAL` are positional arguments, and `[PATH]` an optional one. A name of two
    words puts the command into the group of the first word.
    """

    name: str
    purpose: str
    code: str
    settings: Sequence[str]
    example: str
    options: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)

    def add_to(self, app: typer.Typer) -> None:
        """Register the command with `app`, which is the program or the command's group."""
        others = [_other_option(spec, about) for spec, about in self.options.items()]
        parameters = [*others, *(_setting_option(name, self.about.get(name)) for name in self.settings)]
        parameters.append(
            _option("json", bool, "--json", "Print JSON lines on stdout, in place of text.", default=False)
        )
        if self.settings:
            about = "Settings file (default: config.toml in the home)."
            parameters.append(_option("config", Path | None, "--config", about, metavar="FILE"))

        def callback(**given: Any) -> int:
            # typer gives an empty list for a repeatable option that was not given
            values = {name: given[name] if given[name] != [] else None for name in self.settings}
            options = {each.name: given[each.name] for each in others}
            run: Callable[[Flags], int] = imported(self.code)
            return run(Flags(values=values, json=given["json"], file=given.get("config"), options=options))

        callback.__doc__ = self.purpose
        callback.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        # without short_help the list of commands cuts the purpose off
        epilog = f"Example: {self.example}"
        app.command(self.name.split()[-1], cls=HelpfulCommand, short_help=self.purpose, epilog=epilog)(callback)


_WITH_VALUE = frozenset("--" + name.replace("_", "-") for name, setting in SETTINGS.items() if setting.metavar)


def spread(arguments: Sequence[str]) -> list[str]:
    """Let `--peers A B` mean `--peers A --peers B`: addresses begin with a slash, and commands do not.

    Raises UsageError for an option without a value: the value is empty, or a setting is followed by the next option.
    """
    spread_out: list[str] = []
    for argument in arguments:
        option, is_joined, value = argument.partition("=")
        if not is_joined:
            option, value = spread_out[-1] if spread_out else "", argument
        if option.startswith("--") and not value.strip(" ,"):
            raise _no_value(option, "an empty value")
        if argument.startswith("--") and spread_out and spread_out[-1] in _WITH_VALUE:
            raise _no_value(spread_out[-1], f"no value: {argument} follows it")
        if argument.startswith("/") and len(spread_out) > 1 and spread_out[-2] == "--peers":
            spread_out.append("--peers")
        spread_out.append(argument)
    return spread_out


def _no_value(option: str, found: str) -> UsageError:
    return UsageError(f"{option} has {found}", remedy="give it a value, or leave it out; a shell variable may be empty")


def imported(code: str) -> Any:
    """Return the object that `module:name` refers to."""
    module, name = code.split(":")
    return getattr(importlib.import_module(module), name)


def _setting_option(name: str, about: str | None) -> inspect.Parameter:
    setting = SETTINGS[name]
    default = default_text(name)
    about = f"{about or setting.about}{f' (default: {default})' if default else ''}"
    flag = "--" + name.replace("_", "-")
    if not setting.metavar:
        return _option(name, bool | None, f"{flag}/--no-{flag[2:]}", about)
    kind = list[str] | None if setting.many else str | None
    return _option(name, kind, flag, about, metavar=setting.metavar, complete=COMPLETIONS.get(name))


def _other_option(spec: str, about: str) -> inspect.Parameter:
    flag, _, metavar = spec.partition(" ")
    name = flag.strip("-[]").replace("-", "_").lower()
    kind: Any = Path | None if metavar in {"FILE", "DIR"} or name in {"path", "dir"} else str | None
    if metavar.endswith("…"):
        kind = list[str] | None
    if flag.startswith("--"):
        return _option(
            name, kind if metavar else bool, flag, about, default=None if metavar else False, metavar=metavar
        )
    argument = typer.Argument(help=about, metavar=flag, hidden=True)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, argument])


def _option(
    name: str,
    kind: Any,
    declared: str,
    about: str,
    *,
    default: Any = None,
    metavar: str | None = None,
    complete: Callable[[str], list[str]] | None = None,
) -> inspect.Parameter:
    option = typer.Option(declared, help=about, metavar=metavar or None, show_default=False, autocompletion=complete)
    annotation = Annotated[kind, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def with_peers(flags: Flags) -> Config:
    """Return the settings, which must name a peer. Raises ConfigError."""
    config = flags.member()
    if not config.peers:
        raise UsageError("no peer is named", remedy="give --peers the address of a seed, or of any node of the run")
    return config


def run_file(flags: Flags) -> Path:
    """Return the run file in PATH. Checks that it exists before torch is imported. Raises ConfigError."""
    path = flags.options["path"] or DEFAULT_PATH
    if not path.exists():
        if isinstance(parse_run(str(path)), RunId):
            raise ConfigError(f"{path} is a run's id", remedy="name the run's signed file, which this command needs")
        remedy = f"check the path, or write one: swarm-node run init {path}"
        raise ConfigError(f"{path} cannot be read: it does not exist", remedy=remedy)
    if not path.is_file():
        found = "a directory" if path.is_dir() else "not a file"
        raise ConfigError(f"{path} cannot be read: it is {found}", remedy="name a run file, such as run.toml")
    return path


def file_or_id(flags: Flags) -> Path | RunId:
    """Return the run's file or id, whichever PATH names. Raises ConfigError."""
    named = flags.options["path"]
    which = parse_run(str(named)) if named else None
    if isinstance(which, Path) and not which.exists():
        raise ConfigError(f"{named} cannot be read: it does not exist", remedy=f"name the run's file, or {RUN_ID_FORM}")
    return which if isinstance(which, RunId) else run_file(flags)


def signing_identity(flags: Flags, *, with_any_key: bool = True) -> Identity:
    """Return the key to sign with. Raises ConfigError if there is none: an author must know which key signs.

    Without `with_any_key`, only a key that has signed or trained before may sign, so the error does not suggest a new
    key.
    """
    if given := flags.options.get("identity"):
        if not given.exists():
            raise ConfigError(f"there is no identity file {given}", remedy="check --identity")
        return Identity.load(given)
    home = Home(flags.resolve().home)
    if not home.identity.exists():
        message = f"there is no identity in {home.path} to sign with"
        takes_file = "identity" in flags.options
        if not with_any_key:
            other = ", or the key itself with --identity" if takes_file else ""
            raise ConfigError(message, remedy=f"name the home that has the key with --home{other}")
        other = "a key with --identity" if takes_file else "the home that has one with --home"
        raise ConfigError(message, remedy=f"create one: swarm-node identity --new --home {home.path}; or name {other}")
    return Identity.load(home.identity)


def say_loading(emitter: Emitter) -> None:
    """Say why nothing more is printed for some seconds. Call it before torch and transformers are imported."""
    emitter.say("loading torch and transformers, which takes some seconds")


def say_joining(config: Config, emitter: Emitter) -> None:
    """Say which network is about to be joined, which takes a second, or several if peers do not answer."""
    emitter.say(f"joining the network {config.network_id}")


def say_lookup(model: Path | HubId, emitter: Emitter) -> None:
    """Say what a hub is about to be asked for, since its answer may take seconds. Say nothing for a local model."""
    if isinstance(model, HubId):
        emitter.say(f"asking the hub for {model.model_id}")
