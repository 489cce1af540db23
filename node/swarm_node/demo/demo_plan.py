"""The plan of a demo: the signed run, its size, and how long each part may take. Values and arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from swarm.training.run.run_config import RunConfig
from swarm.training.run.run_tables import DEFAULT_MODEL

from swarm_node.demo.command import INTERVAL_STEPS, MIN_NEW_TOKENS, NUM_NODES, OUTER_STEPS, PROMPT, TEMPERATURE

NUM_CONTEXT_TOKENS = int(DEFAULT_MODEL["max_position_embeddings"])
MAX_NODES = 16
"""More share the same cores for nothing."""

MAX_STEPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """One demo. The times bound what hangs: they are many times what two cores need, which may have other work."""

    num_nodes: int = NUM_NODES
    outer_steps: int = OUTER_STEPS
    interval_steps: int = INTERVAL_STEPS
    prompt: str = PROMPT
    temperature: float = TEMPERATURE
    sampling_seed: int = 1
    min_new_tokens: int = MIN_NEW_TOKENS
    kill_after_tokens: int = 32
    keep: Path | None = None
    start_within_s: float = 300.0
    train_within_s: float = 600.0
    serve_within_s: float = 300.0
    answer_within_s: float = 120.0

    def __post_init__(self) -> None:
        if not 0 < self.kill_after_tokens < self.min_new_tokens:
            raise ValueError("the kill must come while the answer is being written")
        # the other half of the context is left for what is generated until the kill is carried out and missed
        num_prompt_bytes, limit = len(self.prompt.encode()), NUM_CONTEXT_TOKENS // 2
        if not 0 < num_prompt_bytes <= limit - self.min_new_tokens:
            raise ValueError(
                f"a prompt of {num_prompt_bytes} bytes and a completion of {self.min_new_tokens} are too long: "
                f"use at most {limit} together"
            )

    @property
    def room_tokens(self) -> int:
        """Return the length of the longest completion; a byte is a token."""
        return NUM_CONTEXT_TOKENS - len(self.prompt.encode())

    @property
    def num_blocks(self) -> int:
        return int(DEFAULT_MODEL["num_hidden_layers"])

    @property
    def blocks_per_node(self) -> int:
        """Return half the model, so that a chain is two nodes and any one of four may die; fewer nodes take all."""
        return -(-self.num_blocks // 2) if self.num_nodes >= 4 else self.num_blocks

    def run(self) -> RunConfig:
        """Return the run. Late members get a long grace period, so that the first step is taken together."""
        return RunConfig(
            name="demo",
            outer_steps=self.outer_steps,
            interval_steps=self.interval_steps,
            min_group=max(2, self.num_nodes // 2),
            max_group=self.num_nodes,
            cluster_size=1,
            quorum_grace_s=10.0,
        )
