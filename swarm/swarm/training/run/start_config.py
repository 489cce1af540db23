"""Which weights a run begins with: drawn from its seed, or a checkpoint's, pinned by their digest. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.training.run.settings import SettingChecks, is_digest, is_hub_id, is_revision

LOCAL = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartConfig:
    """`checkpoint` is OWNER/NAME on the Hugging Face hub, or "local": each member names the directory of its own copy;
    empty: the weights are drawn from the run's seed.

    `revision` is the hub's branch, tag or commit; signing puts the commit in its place. `digest` is that of the weights
    (`module_run.weights_digest`), which signing fills in and every member checks.
    """

    checkpoint: str = ""
    revision: str = ""
    digest: str = ""

    def __post_init__(self) -> None:
        checks = SettingChecks("start")
        is_known = self.checkpoint in ("", LOCAL) or is_hub_id(self.checkpoint)
        checks.require(is_known, "checkpoint", self.checkpoint, 'use OWNER/NAME or "local", or leave it out')
        fits = self.revision == "" or (self.is_on_hub and is_revision(self.revision))
        remedy = "use a branch, tag or commit with a checkpoint on the hub, and leave it out otherwise"
        checks.require(fits, "revision", self.revision, remedy)
        fits = self.digest == "" or (bool(self.checkpoint) and is_digest(self.digest))
        remedy = "use the 64 hexadecimal digits that run sign fills in, or leave it out"
        checks.require(fits, "digest", self.digest, remedy)
        checks.finish()

    @property
    def is_on_hub(self) -> bool:
        return self.checkpoint not in ("", LOCAL)
