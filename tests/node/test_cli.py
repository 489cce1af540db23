"""The command line itself: help, usage, errors, and what it imports."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from swarm_node import cli, diagnostics, interrupts
from swarm_node.commands.command_options import Command, spread
from swarm_node.commands.help_text import MAX_UNDIVIDED
from swarm_node.settings.config import SETTINGS
from swarm_protocol.errors import ConfigError
from swarm_protocol.version import PROTOCOL_VERSION, software_version

HEAVY = "torch transformers hivemind uvloop grpc fastapi uvicorn openai numpy dns"


@pytest.mark.parametrize("command", [entry.name for entry in cli.COMMANDS])
def test_help_of_each_command_has_a_purpose_and_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*command.split(), "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    [entry] = [entry for entry in cli.COMMANDS if entry.name == command]
    assert entry.purpose[:40] in text
    assert f"Example: swarm-node {command}" in text
    assert "--json" in text
    assert ("--config" in text) == bool(entry.settings), "a settings file that is not used"


def test_help_keeps_text_in_brackets(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for command, text in (("join", "OWNER/NAME[@REVISION]"), ("plan", "[[nodes]]"), ("gateway", "[tokens_per_min]`")):
        assert cli.run([command, "--help"]) == 0
        assert text in capsys.readouterr().out


@pytest.mark.parametrize("command", [entry.name for entry in cli.COMMANDS])
def test_help_of_options_has_half_of_80_columns(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    [entry] = [entry for entry in cli.COMMANDS if entry.name == command]
    abouts = (entry.about.get(name, SETTINGS[name].about) for name in entry.settings)
    texts = [*entry.options.values(), *abouts]
    assert [about for about in texts if textwrap.wrap(about, 40)[0] not in text] == []
    assert max(map(len, text.splitlines())) <= 80


def test_list_of_commands_has_whole_purposes_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = ""
    for arguments in (["--help"], *([group, "--help"] for group in cli.GROUPS)):
        assert cli.run(arguments) == 0
        shown += " ".join(capsys.readouterr().out.split())
    assert [entry.purpose for entry in cli.COMMANDS if entry.purpose not in shown] == []


def test_help_of_plan_describes_the_model_and_dtype_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--model MODEL The Hugging Face model to plan for" in text
    assert "would hold the weights" in text
    assert not re.search("Serve|Servers", text)


def test_commands_describe_anew_only_settings_that_they_take() -> None:
    assert [entry.name for entry in cli.COMMANDS if not {*entry.about} <= {*entry.settings}] == []


def test_help_of_join_names_the_work_before_the_details_of_the_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["join", "--help"]) == 0
    text = capsys.readouterr().out
    places = [text.index(f"  --{name}") for name in ("peers", "run", "model", "max-memory", "listen", "log-level")]
    assert places == sorted(places)


@pytest.mark.parametrize("entry", cli.COMMANDS, ids=lambda entry: entry.name)
def test_help_divides_many_options_into_sections(entry: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*entry.name.split(), "--help"]) == 0
    text = capsys.readouterr().out.partition("\n  Example: ")[0]
    options = re.findall(r"^  (?:-\w, )?--([a-z-]+)", text, re.MULTILINE)
    assert sorted(options) == sorted({*options})
    assert {name.replace("_", "-") for name in entry.settings} <= {*options}
    titles = re.findall(r"^([A-Z][\w ]+):$", text, re.MULTILINE)
    if len(options) <= MAX_UNDIVIDED:
        assert "Options" in titles
        return
    assert (titles[0], titles[-1]) == ("Network", "Other options")
    sizes = [len(re.findall("^  -", part, re.MULTILINE)) for part in re.split(r"^[A-Z][\w ]+:$", text, flags=re.M)[1:]]
    assert max(sizes) <= MAX_UNDIVIDED


@pytest.mark.parametrize("command", ["chat", "models check"])
def test_help_does_not_call_a_model_s_name_a_path(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert "  MODEL  " in text
    assert "<" not in text


@pytest.mark.parametrize(
    ("command", "argument"), [("chat", "MODEL"), ("invite revoke", "SERIAL"), ("run watch", "[PATH]")]
)
def test_usage_has_brackets_around_optional_arguments_only(
    command: str, argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([*command.split(), "--help"]) == 0
    assert f"Usage: swarm-node {command} [OPTIONS] {argument}\n" in capsys.readouterr().out


def test_run_keeps_the_libraries_that_any_command_may_import_from_the_terminal(tmp_path: Path) -> None:
    code = f"""
import logging
from swarm_node import cli
cli.run(["plan", "--home", {str(tmp_path)!r}])
for name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(name).warning("a kernel for another machine")
"""
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120, text=True)
    assert ran.stderr.splitlines()[0] == "error: --model MODEL is missing"
    assert "kernel" not in ran.stderr


def test_output_that_the_locale_cannot_encode_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")

    def run(_arguments: object) -> int:
        out.write("✓ home          /m\udcfcller is writable\n")
        return 0

    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(cli, "run", run)
    monkeypatch.setattr(os, "_exit", Mock())
    cli.main()
    assert out.buffer.getvalue() == b"\\u2713 home          /m\\udcfcller is writable\n"  # type: ignore[attr-defined]


def test_command_without_standard_streams_does_its_work(tmp_path: Path) -> None:
    closed = ("bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash")
    command = (sys.executable, "-m", "swarm_node", "identity", "--new", "--home", str(tmp_path / "home"))
    assert subprocess.run([*closed, *command], check=False).returncode == 0
    assert (tmp_path / "home" / "identity.key").stat().st_size == 68


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"]):
        assert cli.run(arguments) == 0
        text = capsys.readouterr().out
        assert [entry.name for entry in cli.COMMANDS if entry.name.split()[0] not in text] == []


def test_help_of_a_group_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["run"], ["run", "--help"]):
        assert cli.run(arguments) == 0
        text = capsys.readouterr().out
        assert [name for name in ("init", "sign", "show", "watch", "Example:") if name not in text] == []


def test_help_of_run_lists_its_commands() -> None:
    verbs = {entry.name.split()[1] for entry in cli.COMMANDS if entry.name.startswith("run ")} - {"init"}
    assert {verb for verb in verbs if verb not in str(cli.GROUPS["run"].info.help)} == set()


def test_usage_error_in_a_group_names_the_command_s_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, place in ((["run", "sing"], "run"), (["run", "sign", "--bogus"], "run sign"), (["runs"], "")):
        assert cli.run(arguments) == 2
        assert f"see swarm-node {place} --help".replace("  ", " ") in capsys.readouterr().err


LIGHT = [
    ["--help"],
    ["join", "--help"],
    ["identity", "--home", "/nowhere"],
    ["run", "sign", "none", "--home", "/nowhere"],
]


def test_light_commands_import_nothing_heavy() -> None:
    code = f"""
import sys
from swarm_node import cli
for arguments in {LIGHT!r}:
    cli.run(arguments)
    loaded = [name for name in {HEAVY!r}.split() if name in sys.modules]
    assert not loaded, (arguments, loaded)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)


def test_status_and_run_init_import_neither_torch_nor_hivemind(tmp_path: Path) -> None:
    code = f"""
import sys
from swarm_node import cli
for arguments, exit_code in ((["status"], 1), (["run", "init", "run.toml"], 0)):
    assert cli.run([*arguments, "--home", {str(tmp_path)!r}]) == exit_code
    loaded = [name for name in ("torch", "hivemind", "transformers") if name in sys.modules]
    assert not loaded, (arguments, loaded)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120, cwd=tmp_path)


def test_completion_knows_the_commands() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("swarm-node"))],
        env={"_SWARM_NODE_COMPLETE": "complete_bash", "COMP_WORDS": "swarm-node st", "COMP_CWORD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split() == ["status", "stop"]


def test_spread_takes_several_addresses_after_peers() -> None:
    assert spread(["join", "--peers", "/a", "/b", "--json", "/c"]) == [
        *("join", "--peers", "/a", "--peers", "/b", "--json", "/c")
    ]
    assert spread(["--home", "/a", "/b"]) == ["--home", "/a", "/b"]


def test_setting_whose_value_was_an_empty_variable_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["join", "--peers", "--model", "tiny"]) == 2
    assert capsys.readouterr().err.startswith("error: --peers has no value: --model follows it\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["join", "--hours", ""],
        ["join", "--max-upload", ""],
        ["join", "--monthly-traffic", " "],
        ["join", "--peers", ""],
        ["join", "--peers", ","],
        ["join", "--name", ""],
        ["join", "--hours="],
        ["join", "--config", ""],
        ["run", "export", "--out", ""],
        ["run", "export", "--step", ""],
        ["run", "sign", "--identity", ""],
        ["run", "resume", "--members="],
        ["chat", "m", "--temperature", ""],
        ["plan", "--nodes", ""],
        ["simulate", "s.toml", "--seed", ""],
        ["demo", "--keep", ""],
    ],
    ids=" ".join,
)
def test_empty_value_of_any_option_is_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments) == 2
    option = next(each for each in arguments if each.startswith("--")).rstrip("=")
    remedy = "give it a value, or leave it out; a shell variable may be empty"
    assert capsys.readouterr().err == f"error: {option} has an empty value\n  → {remedy}\n"


def test_run_json_error_is_an_event_and_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["join", "--threads", "many", "--json"]) == 2
    captured = capsys.readouterr()
    event = json.loads(captured.out)
    assert event["event"] == "error"
    assert captured.err == f"error: {event['message']}\n  → {event['remedy']}\n"


def test_run_unexpected_exception_is_one_line_with_where_its_traceback_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_arguments: object) -> None:
        raise ZeroDivisionError("a bug\nof two lines")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("swarm_node.commands.command_options.Flags.resolve", broken)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    assert cli.run(["identity"]) == diagnostics.EXIT_BUG
    first, second = capsys.readouterr().err.splitlines()
    assert first == "error: unexpected ZeroDivisionError: a bug"
    [path] = tmp_path.iterdir()
    assert second == f"  → this is a bug; please report it with {path}"
    assert "Traceback" in path.read_text()


def test_run_reports_a_full_disk_anywhere_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device", "/data/x")

    monkeypatch.setattr("swarm_node.commands.command_options.Flags.resolve", full)
    assert cli.run(["identity"]) == 1
    assert capsys.readouterr().err.startswith(
        "error: cannot use /data/x: no space left on device\n  → the disk is full"
    )


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["join", "--help"], ["identity", "--new"], ["identity", "--new", "--json"], ["doctor"]],
    ids=" ".join,
)
def test_command_whose_output_cannot_be_written_fails(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "home"))
    with suppress(OSError), Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert cli.run(arguments) == 1
    error, remedy = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"error: cannot (write the output|go on): no space left on device", error)
    assert remedy.startswith("  → the disk is full")


def test_run_interrupted_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("swarm_node.commands.command_options.Flags.resolve", interrupted)
    assert cli.run(["identity"]) == interrupts.EXIT_INTERRUPTED


def test_run_domain_error_says_message_and_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_arguments: object) -> None:
        raise ConfigError("it cannot be", remedy="do it otherwise")

    monkeypatch.setattr("swarm_node.commands.command_options.Flags.resolve", refused)
    assert cli.run(["identity"]) == diagnostics.EXIT_FAILURE
    assert capsys.readouterr().err == "error: it cannot be\n  → do it otherwise\n"


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"swarm-node {software_version()}, protocol {PROTOCOL_VERSION}\n"


def test_short_help_option_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["status", "-h"]) == 0
    short = capsys.readouterr().out
    assert cli.run(["status", "--help"]) == 0
    assert capsys.readouterr().out == short
