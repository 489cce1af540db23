"""What has changed between two looks, as lines of a log: who came, who went, what became of models and runs.

Pure but for what the last look knew, which `Changes` holds. Whoever was there when the dashboard started has not come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from swarm_node.dashboard.views import Happening, ModelView, NodeView, RunView

SETTLE_S = 10.0
"""From the first look on: a node's own lookups take a few to find all that are there. Who is found so late has come
only if it says that it started since."""


class Changes:
    """Told every look, it says what is new. Owned by the collector's task. `is_settling`: not all are found yet."""

    def __init__(self) -> None:
        self.is_settling = True
        self._first_at: float | None = None
        self._present: dict[str, str] = {}
        self._models: dict[str, str] = {}
        self._runs: dict[str, str] = {}

    def look(
        self, at: float, nodes: Mapping[str, NodeView], models: Mapping[str, ModelView], runs: Mapping[str, RunView]
    ) -> list[Happening]:
        """Oldest first."""
        first_at = self._first_at if self._first_at is not None else at
        self._first_at = first_at
        # what is seen while the dashboard finds its feet is remembered, and not told
        told = [
            *self._of_nodes(at, nodes),
            *self._of_models(at, models),
            *self._of_runs(at, runs),
        ]
        self.is_settling = at - first_at <= SETTLE_S
        if not self.is_settling:
            return told
        new = {peer_id for peer_id, node in nodes.items() if node.started_at > first_at}
        return [one for one in told if one.kind == "join" and one.peer_id in new]

    def _of_nodes(self, at: float, nodes: Mapping[str, NodeView]) -> Iterator[Happening]:
        present = {peer_id: node.name for peer_id, node in nodes.items() if node.state == "alive"}
        before, self._present = self._present, present
        for peer_id, name in present.items():
            if peer_id not in before:
                yield Happening(at=at, kind="join", peer_id=peer_id, words=f"{name} joined")
        for peer_id, name in before.items():
            if peer_id not in present:
                words = f"{name} left" if peer_id in nodes else f"{name} is gone: it says nothing any more"
                yield Happening(at=at, kind="leave", peer_id=peer_id, words=words)

    def _of_models(self, at: float, models: Mapping[str, ModelView]) -> Iterator[Happening]:
        health = {name: model.health for name, model in models.items()}
        before, self._models = self._models, dict(health)
        for name, now in health.items():
            if now != before.get(name):
                yield Happening(at=at, kind="model", peer_id=None, words=f"{name} is {now}: {models[name].words}")
        for name in sorted(before.keys() - health.keys()):
            yield Happening(at=at, kind="model", peer_id=None, words=f"{name} is served by nobody any more")

    def _of_runs(self, at: float, runs: Mapping[str, RunView]) -> Iterator[Happening]:
        state = {run: view.state for run, view in runs.items()}
        before, self._runs = self._runs, dict(state)
        for run, now in state.items():
            if now != before.get(run):
                yield Happening(at=at, kind="run", peer_id=None, words=f"{run}: {runs[run].words}")
