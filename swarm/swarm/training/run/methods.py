"""The names of the methods by which the members of one run call each other."""

from __future__ import annotations


class Methods:
    """The method names of `run`. `follow`, `reduce`, `part`, `history` and `bans` are streams, the others calls."""

    def __init__(self, run: str) -> None:
        self.alive = f"train.alive/{run}"
        self.ready = f"train.ready/{run}"
        self.follow = f"train.follow/{run}"
        self.vote = f"train.vote/{run}"
        self.abort = f"train.abort/{run}"
        self.evidence_offer = f"train.evidence_offer/{run}"
        self.evidence = f"train.evidence/{run}"
        self.bans = f"train.bans/{run}"
        self.resume = f"train.resume/{run}"
        self.endorse = f"train.endorse/{run}"
        self.revoke = f"train.revoke/{run}"
        self.standing = f"train.standing/{run}"
        self.reduce = f"train.reduce/{run}"
        self.group = f"train.group/{run}"
        self.part = f"train.part/{run}"
        self.history = f"train.history/{run}"
        self.manifest = f"train.manifest/{run}"
        self.chunk = f"train.chunk/{run}"
        self.run_file = f"train.run_file/{run}"

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(vars(self).values())
