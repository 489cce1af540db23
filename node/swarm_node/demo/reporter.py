"""Says what happens, to people through the display and to programs as events."""

from __future__ import annotations

from swarm_node.demo.demo_plan import Plan
from swarm_node.demo.demo_state import Board, Event
from swarm_node.demo.display import Display
from swarm_node.events.emitter import Emitter

NUM_STAGES = 5
ANSWER_STAGE = 4
"""From here on the terminal is the answer's."""


class Teller:
    """Owned by the demo's task; `heard` is called for each event of a node, after the board took it in."""

    def __init__(self, plan: Plan, board: Board, display: Display, emitter: Emitter) -> None:
        self.display = display
        self._plan = plan
        self._board = board
        self._emitter = emitter
        self._num_stages = 0
        self._num_told_steps = 0

    def stage(self, title: str) -> None:
        self._num_stages += 1
        self.display.stage(f"[{self._num_stages}/{NUM_STAGES}] {title}")
        self._emitter.emit("stage", number=self._num_stages, of=NUM_STAGES, title=title)

    def heard(self, _name: str, _event: Event) -> None:
        board = self._board
        if self._num_stages < ANSWER_STAGE:
            self.display.update(board)
        while board.all_at(self._num_told_steps + 1):
            self._num_told_steps += 1
            self._emitter.emit(
                "progress",
                outer_step=self._num_told_steps,
                of=self._plan.outer_steps,
                loss=board.losses.get(self._num_told_steps),
                tokens_per_s=board.tokens_per_s,
                bytes_per_param=board.bytes_per_param(),
                digests_equal=board.digests_equal(),
            )

    def token(self, text: str) -> None:
        self.display.token(text)
        self._emitter.emit("token", text=text)

    def killed(self, name: str, peer_id: str) -> None:
        self.display.killed(name)
        self._emitter.emit("killed", name=name, peer_id=peer_id)
