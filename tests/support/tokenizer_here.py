"""A tokenizer without a process, for tests of hundreds of clients; `test_model_assets` has real ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from swarm.serving.tokenizer.model_assets import read_reply
from swarm.serving.tokenizer.tokenizer_worker import TokenizerAnswers


class TokenizerHere:
    """A stand-in for a `TokenizerProcess`, for hundreds of clients: the same answers, as JSON, from this process."""

    def __init__(self, model: str, files: Mapping[str, bytes], *_: object) -> None:
        self._model = model
        self._files = files
        self._answers = TokenizerAnswers()

    def ask(self, what: str, **values: Any) -> Any:
        with TemporaryDirectory(prefix="swarm-test-") as folder:
            if what == "load":
                for name, payload in self._files.items():
                    Path(folder, name).write_bytes(payload)
            request = {"do": what, "model": self._model, "folder": folder, **values}
            told = json.loads(json.dumps(self._answers.answer(json.loads(json.dumps(request)))))
        return read_reply(self._model, told)

    def close(self) -> None:
        """Do nothing, since there is no process."""
