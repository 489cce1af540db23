"""Imports what a node that computes does, in the way that it does: for processes whose forks become such nodes."""

from __future__ import annotations

import importlib

from swarm_node.machine.lean_imports import lean_imports

MODULES = (
    *("swarm_node.roles.volunteer", "swarm_node.roles.training", "transformers.models.llama.modeling_llama"),
    # numba imports most of itself only with the first loop
    "numba.np.arraymath",
)

with lean_imports():
    for name in MODULES:
        importlib.import_module(name)
