"""What was said so far, as a model is given it: messages for its chat template, or text to continue. Pure."""

from __future__ import annotations

from typing import Any, Protocol


class Conversation(Protocol):
    def asking(self, question: str) -> dict[str, Any]:
        """The prompt or messages of a generation that answers."""

    def add(self, question: str, answer: str) -> None: ...

    def clear(self) -> None: ...


class Templated:
    """For a model with a chat template; `system` goes before everything."""

    def __init__(self, system: str) -> None:
        self._system = [{"role": "system", "content": system}] if system else []
        self._said: list[dict[str, str]] = []

    def asking(self, question: str) -> dict[str, Any]:
        return {"messages": [*self._system, *self._said, {"role": "user", "content": question}]}

    def add(self, question: str, answer: str) -> None:
        self._said += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def clear(self) -> None:
        self._said.clear()


class Plain:
    """For a model without one, which goes on from what was written."""

    def __init__(self, system: str) -> None:
        self._system = f"{system}\n" if system else ""
        self._text = self._system

    def asking(self, question: str) -> dict[str, Any]:
        return {"prompt": self._text + question}

    def add(self, question: str, answer: str) -> None:
        self._text += f"{question}{answer}\n"

    def clear(self) -> None:
        self._text = self._system
