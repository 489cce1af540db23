"""What has changed between two snapshots, as events: nodes that came or went, models and runs whose state changed.

Pure but for what the last snapshot held, which `ChangeLog` keeps. A node that was there when the dashboard started has
not come.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from swarm_node.dashboard.views import ChangeEvent, ModelView, NodeView, RunView

SETTLE_S = 10.0
"""The time from the first snapshot in which a node's lookups find all that are there.

A node that is found so late has come only if it says that it started since."""


class ChangeLog:
    """Compares each snapshot with the one before. Owned by the collector's task.

    `is_settling`: not all nodes are found yet.
    """

    def __init__(self) -> None:
        self.is_settling = True
        self._first_at: float | None = None
        self._present: dict[str, str] = {}
        self._models: dict[str, str] = {}
        self._runs: dict[str, str] = {}

    def update(
        self, at: float, nodes: Mapping[str, NodeView], models: Mapping[str, ModelView], runs: Mapping[str, RunView]
    ) -> list[ChangeEvent]:
        """Return what is new, oldest first."""
        first_at = self._first_at if self._first_at is not None else at
        self._first_at = first_at
        # what is seen while the dashboard settles is kept, and not reported
        changes = [
            *self._node_changes(at, nodes),
            *self._model_changes(at, models),
            *self._run_changes(at, runs),
        ]
        self.is_settling = at - first_at <= SETTLE_S
        if not self.is_settling:
            return changes
        new = {peer_id for peer_id, node in nodes.items() if node.started_at > first_at}
        return [one for one in changes if one.kind == "join" and one.peer_id in new]

    def _node_changes(self, at: float, nodes: Mapping[str, NodeView]) -> Iterator[ChangeEvent]:
        present = {peer_id: node.name for peer_id, node in nodes.items() if node.state == "alive"}
        before, self._present = self._present, present
        for peer_id, name in present.items():
            if peer_id not in before:
                yield ChangeEvent(at=at, kind="join", peer_id=peer_id, words=f"{name} joined")
        for peer_id, name in before.items():
            if peer_id not in present:
                words = f"{name} left" if peer_id in nodes else f"{name} is gone: it says nothing any more"
                yield ChangeEvent(at=at, kind="leave", peer_id=peer_id, words=words)

    def _model_changes(self, at: float, models: Mapping[str, ModelView]) -> Iterator[ChangeEvent]:
        health = {name: model.health for name, model in models.items()}
        before, self._models = self._models, dict(health)
        for name, now in health.items():
            if now != before.get(name):
                yield ChangeEvent(at=at, kind="model", peer_id=None, words=f"{name} is {now}: {models[name].words}")
        for name in sorted(before.keys() - health.keys()):
            yield ChangeEvent(at=at, kind="model", peer_id=None, words=f"{name} is served by nobody any more")

    def _run_changes(self, at: float, runs: Mapping[str, RunView]) -> Iterator[ChangeEvent]:
        state = {run: view.state for run, view in runs.items()}
        before, self._runs = self._runs, dict(state)
        for run, now in state.items():
            if now != before.get(run):
                yield ChangeEvent(at=at, kind="run", peer_id=None, words=f"{run}: {runs[run].words}")
