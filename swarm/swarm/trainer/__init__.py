"""The SDK for training: take part in a run from Python, with the run's own model or with a module of one's own.

A run for a module is made with `module_run`, signed with `swarm.training.run.run_file.write_run`, and handed to the
members as a file, with the module's code and first weights beside it.
"""

from __future__ import annotations

from swarm.trainer.blocking import Step, Trainer
from swarm.trainer.member_options import MemberOptions
from swarm.training.run.module_run import module_run

__all__ = ["MemberOptions", "Step", "Trainer", "module_run"]
