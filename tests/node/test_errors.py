"""The messages of all common mistakes say what happened and what to do, soon and without a traceback."""

from __future__ import annotations

import ast
import json
import re
import socket
import time
from functools import cache
from pathlib import Path

import pytest
from swarm_node import cli
from swarm_protocol.identity import Identity

PEER = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWHoK2zDpTB25vHJF4swgbFQqKcK3ruE4pJzSFjXSEDigi"
JOIN = ("join", "--peers", PEER)
SOON_CPU_S = 3.0
"""The limit of computing, imports included: what can be seen at once is said at once, also on a busy machine."""

TINY = '{"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 1, "vocab_size": 256}'
FILES = {
    "broken.toml": "name = ",
    "typo.toml": 'peeers = ["x"]\n',
    "silent.toml": "listen = []\n",
    "unsigned.toml": 'name = "x"\n[model]\nmodel_type = "gpt2"\n',
    "nodes.toml": "[[nodes]]\n",
    "open.keys": "ann sk-0123456789abcdef0123456789abcdef\n",
    "model/config.json": TINY,
    "notes/plan.txt": "",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "endless.toml").write_text("#" * 2**21)
    (tmp_path / "open.keys").chmod(0o644)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "home"))


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Return the exit code, and the error as `message → remedy`.

    Fails unless each is one line and there is no other output but that a library is loaded.
    """
    since = time.process_time()
    code = cli.run(arguments)
    took_s = time.process_time() - since
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    message, remedy = captured.err.removeprefix(
        "loading torch and transformers, which takes some seconds\n"
    ).splitlines()
    assert re.fullmatch(r"error: \S.*[^.\s]", message)
    assert re.fullmatch(r"  → \S.*\S", remedy)
    assert took_s < SOON_CPU_S
    return code, f"{message.removeprefix('error: ')} → {remedy.removeprefix('  → ')}"


WRONG = [
    (("frobnicate",), "No such command 'frobnicate' → see swarm-node --help"),
    (("run", "sing"), "→ see swarm-node run --help"),
    (("join", "--bogus"), "--bogus"),
    (("demo", "--nodes", "many"), "--nodes: 'many' is not a whole number from 2 to 16 → see swarm-node demo --help"),
    (("gateway", "--peers", PEER, "--spot-check", "3"), "--spot-check: '3' is not a number from 0 to 1 → write"),
    (("run", "export", "unsigned.toml", "--peers", PEER), "unsigned.toml is not signed → sign it first"),
    (("join",), "no peer to join through is named, and this home remembers none → give --peers"),
    (("join", "--peers", "seed.example:4001"), "is malformed: it does not start with / → write it like /ip4/"),
    (("join", "--peers", "/ip4/1.2.3.4/tcp/99999/p2p/x"), "--peers: address"),
    (("join", "--peers", "--run", "x.toml"), "--peers has no value: --run follows it → give it a value"),
    (
        ("seed", "--listen", "localhost"),
        "--listen: address 'localhost' is malformed: it does not start with / → write it like /ip4/0.0.0.0/tcp/4001",
    ),
    ((*JOIN, "--run", "missing.toml"), "missing.toml does not exist → give --run the file that"),
    ((*JOIN, "--run", "my-run"), "12 hexadecimal digits, such as my-run-0123456789ab"),
    (("run", "watch", "my-run", "--peers", PEER), "12 hexadecimal digits, such as my-run-0123456789ab"),
    ((*JOIN, "--run", "x", "--model", "y"), "a node either trains or serves → give --run or --model"),
    (("seed", "--listen", ""), "--listen has an empty value → give it a value"),
    (("seed", "--config", "silent.toml"), "a seed needs an address to listen on → give an address, such as --listen"),
    ((*JOIN, "--model", "/nowhere"), "there is no such directory → give --model the directory of config.json and"),
    ((*JOIN, "--model", "."), "holds no config.json → give --model the directory"),
    ((*JOIN, "--model", "model", "--blocks", "8:2"), "'8:2' is not a span START:END"),
    ((*JOIN, "--model", "model", "--max-memory", "lots"), "'lots' is not a size such as 6GiB or 500MB → write --max"),
    ((*JOIN, "--blocks", "0:2"), "there is nothing to serve, so --blocks has no effect → give --model"),
    ((*JOIN, "--device", "tpu"), "'tpu' is not one of auto, cpu, cuda, mps → write --device auto"),
    ((*JOIN, "--network-id", "no good"), "is not a network id"),
    ((*JOIN, "--config", "missing.toml"), "there is no config file missing.toml → check --config"),
    ((*JOIN, "--config", "broken.toml"), "config file broken.toml is not valid TOML"),
    (
        (*JOIN, "--config", "endless.toml"),
        "endless.toml is larger than 1048576 bytes → fix it, move it away, or name a",
    ),
    ((*JOIN, "--config", "binary.toml"), "binary.toml is not a text file → fix it, move it away"),
    ((*JOIN, "--config", "typo.toml"), "unknown setting 'peeers' in typo.toml → did you mean peers?"),
    (("seed", "--home", "/proc/x"), "cannot use the home directory /proc/x"),
    (("gateway", "--peers", PEER, "--port", "99999"), "'99999' is not a whole number from 0 to 65535 → write --port"),
    (("status",), "no daemon is running"),
    (("drain",), "no daemon is running"),
    (("identity",), "there is no identity in"),
    (("run", "sign", "unsigned.toml"), "there is no identity in"),
    (("run", "show", "missing.toml"), "missing.toml cannot be read: it does not exist → check the path, or write one"),
    (("run", "sign", "unsigned.toml", "--identity", "missing.key"), "no identity file missing.key → check --identity"),
    (
        ("run", "resume", "open-0123456789ab", "--peers", PEER),
        "open-0123456789ab is a run's id → name the run's signed file",
    ),
    (("run", "show", "model"), "model cannot be read: it is a directory → name a run file"),
    (("run", "show", "binary.toml"), "binary.toml is not a text file → check that it is the right one"),
    (("run", "show", "/dev/null"), "/dev/null cannot be read: it is not a file → name a run file"),
    (("run", "show", "nodes.toml"), "nodes.toml is not a run file: it has none of a run's settings → name a run file"),
    ((*JOIN, "--run", "nodes.toml"), "nodes.toml is not a run file: it has none of a run's settings → name a run"),
    (("run", "watch", "unsigned.toml"), "no peer is named → give --peers"),
    (("run", "watch", "missing.toml"), "missing.toml cannot be read: it does not exist"),
    (("run", "export", "open-0123456789ab", "--out", "model", "--peers", PEER), "model exists already → move it away"),
    (
        ("chat", "story", "--peers", PEER, "--home", "nodes.toml"),
        "nodes.toml: a file is in the way → choose another directory with --home, or move",
    ),
    (("chat", "story", "--peers", PEER, "--home", "nodes.toml/home"), "nodes.toml/home: a file is in the way"),
    (("run", "init", "nowhere/run.toml"), "cannot be written: no such file or directory → choose another place"),
    (
        ("run", "sign", "unsigned.toml", "--identity", "notes"),
        "cannot read the identity file notes: is a directory → name a key file that this user may read",
    ),
    (("models", "check", "/nowhere"), "there is no such directory → give the directory of config.json"),
    (("models", "check", "nowhere"), "nowhere is not a Hugging Face model directory: there is no such directory"),
    (
        ("models", "check", "notes"),
        "notes is not a Hugging Face model directory: it holds no config.json → give the dir",
    ),
    (("models", "check", "nodes.toml"), "nodes.toml is not a Hugging Face model directory: it is a file → give"),
    (("plan",), "--model MODEL is missing"),
    (("plan", "--model", "/nowhere", "--nodes", "nodes.toml"), "there is no such directory"),
    (("plan", "--model", "model", "--nodes", "missing.toml"), "missing.toml: it is not a file → give --nodes"),
    (("top",), "no swarm is named → give the address"),
    (("top", "--url", "localhost"), "'localhost' is not an address such as http://127.0.0.1:8000 → write --url"),
    (("top", "--url", "http://127.0.0.1:1", "--peers", PEER), "--url and --peers are both given"),
]


@pytest.mark.parametrize(("arguments", "expected"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_wrong_invocation_fails_soon_with_a_line_and_a_remedy(
    arguments: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = said(capsys, *arguments)
    assert code in {1, 2}
    assert expected in error


@pytest.mark.parametrize(
    "arguments",
    [
        ("chat", "--peers", PEER),
        ("demo", "--nodes", "1"),
        ("evidence", "verify"),
        ("gateway",),
        ("invite", "revoke"),
        ("join",),
        (*JOIN, "--then-serve"),
        (*JOIN, "--run", "x", "--model", "y"),
        ("models", "check"),
        ("models", "list"),
        ("models", "publish"),
        ("models", "verify"),
        ("plan",),
        ("run", "endorse", "unsigned.toml"),
        ("run", "watch", "unsigned.toml"),
        ("simulate",),
        ("top",),
    ],
    ids=" ".join,
)
def test_missing_argument_is_wrong_usage_in_every_command(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, *arguments)[0] == cli.EXIT_USAGE


@pytest.mark.parametrize(
    ("content", "mode", "expected"),
    [
        (b"not a key", 0o600, "is not a libp2p Ed25519 private key → restore it from a backup"),
        (None, 0o644, "can be read or changed by other users (mode 0644) → if nobody else can have copied it: chmod"),
    ],
)
def test_unusable_key_fails_with_a_line_and_a_remedy(
    content: bytes | None, mode: int, expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    key = home / "identity.key"
    Identity.generate().save(key)
    if content is not None:
        key.write_bytes(content)
    key.chmod(mode)
    assert expected in said(capsys, *JOIN)[1]


def test_command_that_needs_only_the_home_ignores_other_invalid_settings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/config.toml").write_text("port = 99999\n")
    for command in ("status", "drain", "stop"):
        assert "no daemon is running" in said(capsys, command)[1]
    assert "port in" in said(capsys, "identity")[1]


def test_unknown_variable_is_compared_without_its_prefix(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_PEER", PEER)
    assert "environment variable SWARM_PEER → did you mean SWARM_PEERS?" in said(capsys, "status")[1]
    monkeypatch.delenv("SWARM_PEER")
    monkeypatch.setenv("SWARM_QQQ", "1")
    assert (
        "→ use an option's name from `swarm-node COMMAND --help`, such as SWARM_MAX_MEMORY" in said(capsys, "status")[1]
    )


def test_silent_dashboard_fails_with_a_line_and_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    code, error = said(capsys, "top", "--url", "http://127.0.0.1:1", "--once")
    assert code == 1
    assert error.startswith("no dashboard answers at http://127.0.0.1:1: the connection was refused; nothing listens")
    assert "→ give --url the address that `swarm-node dashboard` or `swarm-node gateway` printed" in error


@pytest.mark.parametrize("command", ["gateway", "dashboard"])
def test_occupied_port_fails_with_a_line_and_a_remedy_before_slow_imports(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm_node.commands.daemons.imported", pytest.fail)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        code = cli.run([command, "--peers", PEER, "--port", port, "--json"])
    told = capsys.readouterr()
    assert code == 1
    event = json.loads(told.out.splitlines()[-1])
    assert event["message"].startswith(f"cannot listen on 127.0.0.1 port {port}")
    assert "choose another --port" in event["remedy"]
    assert "Traceback" not in told.err


ROOT = Path(__file__).parents[2]
TOLD = {"ConfigError", "StartError", "UsageError"}
SOURCES = [
    path
    for package in ("node/swarm_node", "swarm/swarm", "protocol/swarm_protocol", "compression/swarm_compression")
    for path in (ROOT / package).rglob("*.py")
]


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def parsed(path: Path, *words: str) -> list[ast.AST]:
    """Return the file's syntax tree if the file has one of `words`, since parsing all files takes seconds."""
    return list(ast.walk(ast.parse(text_of(path)))) if any(word in text_of(path) for word in words) else []


def test_every_config_error_says_what_to_do() -> None:
    lacking = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for node in parsed(path, *TOLD)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in TOLD
        if not any(_says_something(keyword) for keyword in node.keywords)
    ]
    assert len(SOURCES) > 100
    assert lacking == []


def _says_something(keyword: ast.keyword) -> bool:
    return keyword.arg == "remedy" and not (isinstance(keyword.value, ast.Constant) and not keyword.value.value)


def test_no_message_shows_an_os_error_in_python_s_form() -> None:
    """`[Errno 2] No such file or directory: 'x'` is Python's form; a message has the system's words, `strerror`."""
    leaks = [
        f"{path.relative_to(ROOT)}:{value.lineno}"
        for path in SOURCES
        for handler in parsed(path, "OSError")
        if isinstance(handler, ast.ExceptHandler) and handler.type is not None and handler.name
        if "OSError" in {each.id for each in ast.walk(handler.type) if isinstance(each, ast.Name)}
        for statement in ast.walk(handler)
        if isinstance(statement, ast.Raise | ast.Return)
        for value in ast.walk(statement)
        if isinstance(value, ast.FormattedValue)
        if isinstance(value.value, ast.Name) and value.value.id == handler.name
    ]
    assert leaks == []
