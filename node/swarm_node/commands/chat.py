"""`swarm-node chat`: a conversation with a model of a network, in a terminal or over a pipe."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from swarm.heap import uncollected
from swarm.router.revisions import short_revision
from swarm_protocol import limits
from swarm_protocol.errors import ConfigError, SwarmError

from swarm_node import diagnostics
from swarm_node.commands.command_options import Flags, say_joining
from swarm_node.events.emitter import Emitter
from swarm_node.formatting import REPLACEMENT, plural
from swarm_node.settings.parsers import number, whole_number
from swarm_node.storage.home import Home
from swarm_node.storage.kept_invitation import check_right
from swarm_node.storage.remembered_peers import join_addrs

if TYPE_CHECKING:
    from swarm.client import Client

FIRST_S = 10.0
"""Longest wait for the model's records. They usually arrive within two seconds of the connection."""

QUIET_S = 2.0
"""Seconds of this wait before it ends if other models are known, or else the user is told that it goes on."""
LOOK_S = 0.25
MAX_INPUT_CHARS = 2_000_000
"""Maximum length of a question on standard input; a gateway has the same limit for prompts."""

TEMPERATURE = 0.7
PROMPT = "> "
ANEW = "/new"
HELP = "/help"
EXIT = "/exit"
KEYS = (
    f"Ctrl-C stops an answer, {ANEW} starts a new conversation, {EXIT} or Ctrl-D ends the chat, {HELP} shows this; "
    "put a space before a text that begins with a slash"
)
COMMAND = re.compile(r"(/[a-z]+)(\s.*)?")
"""A line that begins with a slash and a word is not a question, so a mistyped command is not sent to servers."""
SEE_HELP = "see swarm-node chat --help"

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Conversation:
    """A conversation with `model`. `system` precedes all messages.

    A model without a chat template continues the text of the conversation. A `temperature` of None becomes the model's
    own, or TEMPERATURE.
    """

    model: str
    system: str
    temperature: float | None
    max_tokens: int | None
    has_template: bool = False
    said: list[tuple[str, str]] = field(default_factory=list)

    def asking(self, question: str) -> dict[str, Any]:
        """Return the arguments of a generation that answers `question`."""
        from swarm.client import SamplingParams  # noqa: PLC0415 - takes a second to load

        sampling = SamplingParams(temperature=self.temperature)
        asked = {"model": self.model, "sampling": sampling, "max_tokens": self.max_tokens}
        if not self.has_template:
            system = f"{self.system}\n" if self.system else ""
            return {**asked, "prompt": system + "".join(f"{q}{a}\n" for q, a in self.said) + question}
        messages = [("system", self.system)] if self.system else []
        for earlier, answer in self.said:
            messages += [("user", earlier), ("assistant", answer)]
        messages.append(("user", question))
        return {**asked, "messages": [{"role": role, "content": text} for role, text in messages]}


def run(flags: Flags) -> int:
    config = flags.member()
    conversation = _conversation_of(flags)
    check_right(config, "ask", "ask a model")
    peers = join_addrs(config)
    emitter = Emitter(json=flags.json)
    say_joining(config, emitter)
    with uncollected():
        from swarm.client import Client, KnownPublishers, UsedRevisions  # noqa: PLC0415

    from swarm_node.storage.client_models import kept_models, publishers_in, used_in  # noqa: PLC0415

    home = Home(config.home)
    home.check_own()
    is_kept = home.path.is_dir()
    used = used_in(home.revisions, config.network_id) if is_kept else UsedRevisions()
    publishers = (
        publishers_in(home.publishers, config.network_id, config.publisher)
        if is_kept
        else KnownPublishers(config.publisher)
    )
    kept = kept_models(config, home, emitter)
    diagnostics.begin_work()
    with Client(
        peers=peers,
        network_id=config.network_id,
        used=used,
        publishers=publishers,
        invite=config.invite,
        text_at_home=kept,
    ) as client:
        chat = Chat(client, conversation, emitter)
        chat.begin()
        if sys.stdin.isatty():
            chat.converse()
        else:
            chat.answer(_piped())
    return 0


class Chat:
    """Asks the client for answers and shows them. An answer that fails does not enter the conversation."""

    def __init__(self, client: Client, conversation: Conversation, emitter: Emitter) -> None:
        self._client = client
        self._conversation = conversation
        self._emitter = emitter

    def begin(self) -> None:
        """Find the model and print its revision. Raises ConfigError if it is not served."""
        model = self._conversation.model
        status = soon(lambda: self._client.model(model), model, self._emitter, self._known)
        self._conversation.has_template = self._client.has_chat_template(model)
        if self._conversation.temperature is None:
            self._conversation.temperature = self._client.default_sampling(model).get("temperature", TEMPERATURE)
        if not self._conversation.has_template:
            self._emitter.say(f"{model} has no chat template: it continues the text of the conversation")
        if status is not None:
            servers = plural(status.num_servers, "server")
            by = f"published by {status.publisher}" if status.publisher else "unpublished"
            self._emitter.say(f"{status.name}, revision {short_revision(status.revision)}, {by}, on {servers}")

    def _known(self) -> list[str]:
        return [model.name for model in self._client.models()]

    def converse(self) -> None:
        """Answer questions until the input ends. Ctrl-C stops an answer. At the prompt, Ctrl-C raises
        KeyboardInterrupt."""
        self._emitter.say(KEYS)
        for question in _questions():
            if (command := COMMAND.fullmatch(question)) is not None:
                if command[1] == EXIT and not (command[2] or "").strip():
                    return
                self._obey(command[1], (command[2] or "").strip())
                continue
            # what precedes a slash only kept it from being read as a command
            text = question.lstrip() if question.lstrip().startswith("/") else question
            try:
                self.answer(text, goes_on=True)
            except SwarmError as error:
                self._emitter.error(error)

    def _obey(self, command: str, rest: str) -> None:
        if rest and command in {ANEW, HELP, EXIT}:
            self._emitter.say(f"{command} must be alone on its line, so nothing was done: {KEYS}")
        elif command == ANEW:
            self._conversation.said.clear()
            self._emitter.say("this is a new conversation: the earlier messages are forgotten")
        else:
            self._emitter.say(KEYS if command == HELP else f"unknown command {command}: {KEYS}")

    def answer(self, question: str, *, goes_on: bool = False) -> None:
        """Stream the answer. If the conversation `goes_on`, Ctrl-C stops only the answer, and its text so far is
        kept."""
        text, reason = "", None
        try:
            tokens: Any = self._client.generate(**self._conversation.asking(question))
            with closing(tokens):
                for token in tokens:
                    text, reason = text + token.text, token.finish_reason
                    self._show(token.text)
        except KeyboardInterrupt:
            if not goes_on:
                raise
        finally:
            self._show("\n")
        self._conversation.said.append((question, text))
        if self._emitter.json:
            self._emitter.emit("chat_answer", model=self._conversation.model, text=text, finish_reason=reason)

    def _show(self, text: str) -> None:
        if not self._emitter.json:
            sys.stdout.write(fit_for_terminal(text) if sys.stdout.isatty() else text)
            sys.stdout.flush()


def fit_for_terminal(text: str) -> str:
    """Return `text` without control characters: strangers' machines wrote it, and such characters move the cursor."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else REPLACEMENT for letter in text)


def soon(
    look: Callable[[], T | None], sought: str, emitter: Emitter, known: Callable[[], list[str]] = list
) -> T | None:
    """Call `look` until it returns something, for at most FIRST_S, or QUIET_S if others are `known` by then: their
    records are here, so those of `sought` would be, too."""
    began_s, has_said = time.monotonic(), False
    while not (found := look()) and (passed_s := time.monotonic() - began_s) < FIRST_S:
        if passed_s >= QUIET_S and not has_said:
            if known():
                break
            emitter.say(f"no server of {sought} was found yet: looking for {FIRST_S:.0f} s in all")
            has_said = True
        time.sleep(LOOK_S)
    return found


def _questions() -> Iterator[str]:
    import readline  # noqa: F401, PLC0415 - lets `input` edit lines and remember them

    while True:
        try:
            question = input(PROMPT)
        except EOFError:
            return
        if question.strip():
            yield question


def _piped() -> str:
    """Read the question from standard input. Raises ConfigError if it is empty, too long or not text."""
    try:
        text = sys.stdin.read(MAX_INPUT_CHARS + 1)
        text.encode()  # in the C locale, bytes that are not text are read as surrogates
    except UnicodeError as error:
        raise ConfigError(
            "the question on standard input is not text in UTF-8", remedy="convert it to UTF-8 first"
        ) from error
    if not text.strip():
        raise ConfigError("there is no question on standard input", remedy="pipe a question in, or chat in a terminal")
    if len(text) > MAX_INPUT_CHARS:
        raise ConfigError(f"the question has over {MAX_INPUT_CHARS} characters", remedy="shorten it")
    return text.rstrip("\n")


def _conversation_of(flags: Flags) -> Conversation:
    model = flags.needed("model", "name a model that swarm-node models lists")
    return Conversation(
        model=model,
        system=flags.options["system"] or "",
        temperature=flags.parsed("temperature", number(0, 2), SEE_HELP),
        max_tokens=flags.parsed("max_tokens", whole_number(1, limits.MAX_SESSION_TOKENS), SEE_HELP),
    )
