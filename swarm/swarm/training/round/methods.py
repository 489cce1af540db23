"""The names under which the members of one run call each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Methods:
    """`reduce`, `part` and `history` are streams, the others calls."""

    run: str

    @property
    def alive(self) -> str:
        return f"train.alive/{self.run}"

    @property
    def ready(self) -> str:
        return f"train.ready/{self.run}"

    @property
    def vote(self) -> str:
        return f"train.vote/{self.run}"

    @property
    def abort(self) -> str:
        return f"train.abort/{self.run}"

    @property
    def resume(self) -> str:
        return f"train.resume/{self.run}"

    @property
    def standing(self) -> str:
        return f"train.standing/{self.run}"

    @property
    def reduce(self) -> str:
        return f"train.reduce/{self.run}"

    @property
    def part(self) -> str:
        return f"train.part/{self.run}"

    @property
    def history(self) -> str:
        return f"train.history/{self.run}"

    @property
    def manifest(self) -> str:
        return f"train.manifest/{self.run}"

    @property
    def chunk(self) -> str:
        return f"train.chunk/{self.run}"

    @property
    def run_file(self) -> str:
        return f"train.run_file/{self.run}"
