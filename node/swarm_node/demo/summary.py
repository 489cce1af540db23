"""How the demo ended: one event for programs, one table for people, and what to type next."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """`loss_*` are the validation losses before the first and after the last outer step. `completion` lacks the prompt.

    `failover_ms`: the longest time between two tokens once a node was killed, as the client saw it. `tokens_per_s` is
    the training speed of all nodes together.
    `tokens_identical`: `completion` is what one process says that holds the whole checkpoint and was not disturbed.
    """

    nodes: int
    outer_steps: int
    parameters: int
    loss_first: float
    loss_last: float
    digests_equal: bool
    digest: str
    bytes_per_param_per_step: float
    tokens_per_s: float
    failover_ms: float
    killed: str
    tokens: int
    tokens_identical: bool
    prompt: str
    completion: str
    seconds: float
    checkpoint: str

    def as_event(self) -> dict[str, object]:
        return asdict(self)


def show(console: Console, summary: Summary) -> None:
    """The figures, one line each."""
    same = "identical to" if summary.tokens_identical else "DIFFERENT from"
    lines = {
        "validation loss": f"{summary.loss_first:.3f} → {summary.loss_last:.3f} in {summary.outer_steps} outer steps",
        "replicas": f"{'bit-identical' if summary.digests_equal else 'DIFFERENT'} on {summary.nodes} nodes, "
        f"state {summary.digest[:16]}",
        "traffic": f"{summary.bytes_per_param_per_step:.2f} bytes a parameter, member and outer step "
        f"({summary.parameters:,} parameters)",
        "speed": f"{summary.tokens_per_s:,.0f} tokens/s, all nodes together",
        "failover": f"{summary.killed} killed in mid-answer: {summary.failover_ms:.0f} ms pause",
        "tokens": f"{summary.tokens}, {same} an undisturbed run",
        "time": f"{summary.seconds:.0f} s",
    }
    console.print()
    for title, text in lines.items():
        console.print(f"  [dim]{title:<16}[/] {text}", highlight=False, soft_wrap=True)


def show_next(console: Console, summary: Summary, kept: Path | None) -> None:
    """Commands to paste."""
    model = summary.checkpoint if kept else "DIR"
    if kept:
        told = f"\nThe trained model, a Hugging Face directory: {model}"
        console.print(told, highlight=False, markup=False, soft_wrap=True)
    else:
        console.print("\nTo keep the trained model: swarm-node demo --keep DIR", highlight=False, markup=False)
    console.print(
        "Your own swarm:\n"
        "  swarm-node seed --home ~/seed                            # prints its address ADDR\n"
        f"  swarm-node join --home ~/node --peers ADDR --model {model}\n"
        "  swarm-node gateway --home ~/gateway --peers ADDR         # for any OpenAI client: http://127.0.0.1:8000/v1",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
