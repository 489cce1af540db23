"""`swarm-node chat` and `swarm-node models`, over a scripted client."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest
from swarm.client import ModelStatus, OtherRevision, Token
from swarm_node import cli, interrupts
from swarm_node.commands.chat import TEMPERATURE, fit_for_terminal
from swarm_node.commands.models import served
from swarm_protocol.errors import ConfigError, SessionError

PEER = "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWEtzWYTS1aBTBc5K2Y7YwN6XnhWkVUNXmS6bSjgjLUrBM"
OWN, OTHER = "5c819ed1" * 4, "0d1e2f3a" * 4

Script = Sequence[str | BaseException]


def status(name: str, **changes: Any) -> ModelStatus:
    values = {"revision": OWN, "num_blocks": 8, "num_servers": 2, "missing": (), "unreachable": (), "age_s": 1.0}
    return ModelStatus(name=name, **{**values, **changes})


class ScriptedClient:
    """A stand-in for `swarm.client.Client`."""

    scripts: ClassVar[list[Script]]
    asked: ClassVar[list[Mapping[str, Any]]]
    served: ClassVar[Sequence[ModelStatus]]
    has_template: ClassVar[bool]
    own: ClassVar[Mapping[str, float]]
    num_closed: ClassVar[int]

    def __init__(self, *, peers: Sequence[str], network_id: str, **_: object) -> None:
        assert tuple(peers) == (PEER,)
        assert network_id == "swarm"

    def __enter__(self) -> ScriptedClient:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def models(self) -> Sequence[ModelStatus]:
        return self.served

    def model(self, name: str) -> ModelStatus | None:
        return next((model for model in self.served if model.name == name), None)

    def context_tokens(self, model: str) -> int:
        if model == "sick":
            raise SessionError("nobody gives its files")
        return 256

    def has_chat_template(self, model: str) -> bool:
        if self.model(model) is None:
            raise ConfigError(f"nobody serves a model {model!r}; known models: story", remedy="use one of these")
        return self.has_template

    def default_sampling(self, model: str) -> Mapping[str, float]:
        assert self.model(model)
        return self.own

    def generate(self, **asked: Any) -> Iterator[Token]:
        type(self).asked.append(asked)
        return self._run(self.scripts.pop(0))

    def _run(self, script: Script) -> Iterator[Token]:
        try:
            for i, each in enumerate(script):
                if isinstance(each, BaseException):
                    raise each
                yield Token(text=each, token_id=i, finish_reason="stop" if i == len(script) - 1 else None)
        finally:
            type(self).num_closed += 1


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedClient]:
    monkeypatch.setattr("swarm.client.Client", ScriptedClient)
    monkeypatch.setattr("swarm_node.commands.chat.FIRST_S", 0.0)
    ScriptedClient.scripts, ScriptedClient.asked, ScriptedClient.own = [], [], {}
    ScriptedClient.served, ScriptedClient.has_template, ScriptedClient.num_closed = [status("story")], True, 0
    return ScriptedClient


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Any:
    def type_(text: str, *, in_terminal: bool = True) -> None:
        monkeypatch.setattr("sys.stdin", Terminal(text) if in_terminal else io.StringIO(text))

    return type_


def chat(*arguments: str) -> int:
    return cli.run(["chat", "--peers", PEER, *arguments])


def test_chat_streams_answers_and_keeps_the_conversation(
    scripted: type[ScriptedClient], typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("hello\n\nand you?\n")
    scripted.scripts = [["I am ", "well"], ["fine"]]
    assert chat("story", "--system", "be brief", "--temperature", "0", "--max-tokens", "9") == 0
    out, err = capsys.readouterr()
    assert out == "> I am well\n> > fine\n> "
    assert "story, revision 5c819ed15c81, unpublished, on 2 servers" in err
    (first, second) = scripted.asked
    assert (first["model"], first["sampling"].temperature, first["max_tokens"]) == ("story", 0.0, 9)
    assert first["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert second["messages"] == [
        *first["messages"],
        {"role": "assistant", "content": "I am well"},
        {"role": "user", "content": "and you?"},
    ]


def test_chat_ctrl_c_stops_only_the_answer_and_keeps_its_text_so_far(
    scripted: type[ScriptedClient], typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("hello\nand?\n")
    scripted.scripts = [["I am ", KeyboardInterrupt(), "well"], ["fine"]]
    assert chat("story") == 0
    assert capsys.readouterr().out == "> I am \n> fine\n> "
    assert scripted.num_closed == 2
    assert scripted.asked[1]["messages"][1] == {"role": "assistant", "content": "I am "}
    assert scripted.asked[0]["sampling"].temperature == TEMPERATURE


def test_chat_without_a_temperature_draws_with_the_model_s_own(scripted: type[ScriptedClient], typed: Any) -> None:
    typed("hello\n")
    scripted.scripts, scripted.own = [["hi"]], {"temperature": 0.3, "top_k": 20}
    assert chat("story") == 0
    assert (scripted.asked[0]["sampling"].temperature, scripted.asked[0]["sampling"].top_k) == (0.3, None)


def test_chat_ctrl_c_at_the_prompt_ends_it(
    scripted: type[ScriptedClient], typed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_prompt: str) -> str:
        raise KeyboardInterrupt

    typed("")
    monkeypatch.setattr("builtins.input", interrupted)
    assert chat("story") == interrupts.EXIT_INTERRUPTED


def test_chat_reports_a_failed_answer_and_leaves_it_out_of_the_conversation(
    scripted: type[ScriptedClient], typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("hello\nagain\n/new\nonce more\n")
    scripted.scripts = [["I", SessionError("blocks are missing", remedy="wait")], ["yes"], ["no"]]
    assert chat("story") == 0
    assert "error: blocks are missing\n  → wait\n" in capsys.readouterr().err
    assert [len(asked["messages"]) for asked in scripted.asked] == [1, 1, 1], "/new must begin anew"


def test_chat_does_not_send_commands_to_the_model(
    scripted: type[ScriptedClient], typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("/help\n/frob\n/new extra\n/new \n/etc/hosts?\n /new words\n/exit now\n/exit\nnever asked\n")
    scripted.scripts = [["a file"], ["words"]]
    assert chat("story") == 0
    said = capsys.readouterr()
    assert said.out == "> > > > > a file\n> words\n> > "
    assert said.err.count("/new starts a new conversation") == 5
    assert said.err.count(" must be alone on its line, so nothing was done: Ctrl-C") == 2
    assert said.err.count("the earlier messages are forgotten\n") == 1
    assert "unknown command /frob: Ctrl-C stops an answer" in said.err
    assert [asked["messages"][-1]["content"] for asked in scripted.asked] == ["/etc/hosts?", "/new words"]


def test_chat_over_a_pipe_answers_once(
    scripted: type[ScriptedClient], typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("two\nlines\n", in_terminal=False)
    scripted.scripts = [["an \x1b[31m", "answer"]]
    assert chat("story") == 0
    assert capsys.readouterr().out == "an \x1b[31manswer\n"
    assert scripted.asked[0]["messages"] == [{"role": "user", "content": "two\nlines"}]


def test_chat_over_a_pipe_ctrl_c_ends_with_130_and_an_error_with_one_line(
    scripted: type[ScriptedClient], typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("hello", in_terminal=False)
    scripted.scripts = [["I", KeyboardInterrupt()]]
    assert chat("story") == interrupts.EXIT_INTERRUPTED
    typed("hello", in_terminal=False)
    scripted.scripts = [[SessionError("blocks are missing")]]
    assert chat("story") == 1
    assert capsys.readouterr().err.endswith("error: blocks are missing\n")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_chat_over_a_pipe_refuses_bytes_that_are_no_text(
    scripted: type[ScriptedClient], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], errors: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8", errors=errors))
    assert chat("story") == 1
    assert "error: the question on standard input is not text in UTF-8" in capsys.readouterr().err


def test_chat_as_events(scripted: type[ScriptedClient], typed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    typed("hello", in_terminal=False)
    scripted.scripts = [["I am ", "well"]]
    assert chat("story", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["event"], answer["text"], answer["finish_reason"]) == ("chat_answer", "I am well", "stop")


def test_chat_with_a_model_without_a_template_says_so_and_continues_the_text(
    scripted: type[ScriptedClient], typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    typed("Once\nThen\n")
    scripted.has_template = False
    scripted.scripts = [[" upon"], [" he"]]
    assert chat("story", "--system", "A tale.") == 0
    assert "story has no chat template: it continues the text" in capsys.readouterr().err
    assert [asked["prompt"] for asked in scripted.asked] == ["A tale.\nOnce", "A tale.\nOnce upon\nThen"]


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ((), 2, "MODEL is missing"),
        (("stroy",), 1, "nobody serves a model 'stroy'; known models: story"),
        (("story", "--temperature", "hot"), 2, "--temperature: 'hot' is not a number from 0 to 2"),
        (("story", "--temperature", "nan"), 2, "--temperature: 'nan' is not a number from 0 to 2"),
        (("story", "--max-tokens", "0"), 2, "--max-tokens: '0' is not a whole number from 1"),
        (("story",), 1, "there is no question on standard input"),
    ],
)
def test_chat_that_cannot_start_says_why_in_one_line(
    scripted: type[ScriptedClient],
    typed: Any,
    capsys: pytest.CaptureFixture[str],
    arguments: Sequence[str],
    code: int,
    told: str,
) -> None:
    typed("\n", in_terminal=False)
    assert chat(*arguments) == code
    assert f"error: {told}" in capsys.readouterr().err
    assert not scripted.asked


def test_chat_removes_terminal_codes_from_strangers_text() -> None:
    assert fit_for_terminal("a\x1b[2J\r\u202eb\n\tc") == "a�[2J��b\n\tc"


MODELS = [
    status(
        "story",
        others=(OtherRevision(revision=OTHER, num_blocks=4, num_servers=1, missing=((0, 1), (3, 4))),),
    ),
    status("half", missing=((4, 6),), num_servers=3, publisher="12D3KooWhalf", standing="remembered"),
    status("sick", publisher="12D3KooWsick", standing="new"),
]

TABLE = """\
MODEL               REVISION      PUBLISHER       BLOCKS         SERVERS  CONTEXT
story               5c819ed15c81  unpublished     0:8 of 8       2        256      whole
story@0d1e2f3a0d1e  0d1e2f3a0d1e  -               1:3 of 4       1        -        other weights, nobody serves 0:1, 3:4
half                5c819ed15c81  12D3KooWhalf    0:4, 6:8 of 8  3        -        nobody serves 4:6
sick                5c819ed15c81  (12D3KooWsick)  0:8 of 8       2        -        whole
"""


def test_models_are_listed_with_their_revisions(
    scripted: type[ScriptedClient], capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.served = MODELS
    assert cli.run(["models", "--peers", PEER]) == 0
    assert capsys.readouterr().out == TABLE
    assert cli.run(["models", "list", "--peers", PEER]) == 0
    assert capsys.readouterr().out == TABLE


def test_models_lists_none_of_the_blocks_of_a_model_whose_servers_are_still_loading(
    scripted: type[ScriptedClient], capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.served = [status("story", missing=((0, 8),))]
    assert cli.run(["models", "--peers", PEER]) == 0
    assert "  none of 8  2  " in " ".join(capsys.readouterr().out.split("\n")).replace("        ", "  ")


def test_models_as_an_event(scripted: type[ScriptedClient], capsys: pytest.CaptureFixture[str]) -> None:
    scripted.served = MODELS
    assert cli.run(["models", "--json", "--peers", PEER]) == 0
    story, half, sick = json.loads(capsys.readouterr().out)["models"]
    assert story == {
        "name": "story",
        "revision": OWN,
        "num_blocks": 8,
        "served": [[0, 8]],
        "missing": [],
        "num_servers": 2,
        "publisher": None,
        "manifest": None,
        "standing": "unpublished",
        "dtype": None,
        "context_tokens": 256,
        "others": [
            {"revision": OTHER, "num_blocks": 4, "served": [[1, 3]], "missing": [[0, 1], [3, 4]], "num_servers": 1}
        ],
    }
    assert (half["served"], half["context_tokens"], sick["context_tokens"]) == ([[0, 4], [6, 8]], None, None)


def test_models_of_a_network_without_any_says_so(
    scripted: type[ScriptedClient], capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.served = []
    assert cli.run(["models", "--peers", PEER]) == 0
    assert capsys.readouterr().out == "no model is served in this network\n"


@pytest.mark.parametrize(
    ("command", "served", "told"),
    [
        (["models"], [], ["no server of a model was found yet: looking for 1 s in all"]),
        (["chat", "stroy"], [], ["no server of stroy was found yet: looking for 1 s in all"]),
        (["chat", "stroy"], ["poem", "story"], []),
    ],
)
def test_longer_wait_for_a_first_server_is_told_and_ends_once_others_are_known(
    scripted: type[ScriptedClient],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    served: list[str],
    told: list[str],
) -> None:
    scripted.served = [*map(status, served)]
    monkeypatch.setattr("swarm_node.commands.chat.FIRST_S", 0.6)
    monkeypatch.setattr("swarm_node.commands.chat.QUIET_S", 0.1)
    cli.run([*command, "--peers", PEER])
    joining, *said = capsys.readouterr().err.splitlines()
    assert joining == "joining the network swarm"
    assert [line for line in said if "found yet" in line] == told


@pytest.mark.parametrize("command", [["models"], ["chat", "story"]])
def test_without_a_peer_there_is_no_network(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    assert cli.run([*command, "--home", str(tmp_path)]) == 2
    assert "error: no peer to join through is named" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "expected"),
    [((), [(0, 4)]), (((0, 4),), []), (((1, 2),), [(0, 1), (2, 4)]), (((0, 1), (3, 4)), [(1, 3)])],
)
def test_served_blocks_are_those_that_are_not_missing(missing: Any, expected: Any) -> None:
    assert served(missing, 4) == expected
