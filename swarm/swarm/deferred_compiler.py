"""torch's compiler, imported only once something is compiled.

transformers imports it for a few decorators, and torch.distributed.tensor for types of sharded models: 0.8 s of the
processor and 75 MB in each process that loads a model. What libraries can do without by themselves is left to
`swarm.heap.absent`. The state is that of the interpreter: `sys.meta_path` and `sys.modules`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"
ALONE = "_trace_wrapped_higher_order_op"
"""The one module of the compiler that transformers uses. It does without the others."""
SHARDING = "transformers.distributed"


def defer_compiler() -> None:
    """Give whoever imports torch's compiler from now on a stand-in, which imports it when it is asked for more than
    decorators; and let transformers find that this torch cannot shard a model.

    For programs: it stays so to the end. It is without effect on what has been imported already. What a stand-in has
    decorated is compiled like any other function. In transformers that is its paged cache and its kernels for FP8.
    """
    if COMPILER not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == SHARDING:
            _answer_that_nothing_is_sharded()
        if fullname.startswith(f"{COMPILER}.") and fullname != f"{COMPILER}.{ALONE}":
            # first, since this module asks for the compiler while it is imported, and the compiler needs it as a whole
            _import_compiler()
            there = sys.modules.get(fullname)
            if there is None:
                return PathFinder.find_spec(fullname, path)
            return ModuleSpec(fullname, _LoaderOfOne(there), origin=there.__file__)
        if fullname != COMPILER or path is None:
            return None
        spec = ModuleSpec(fullname, _StandInLoader(), is_package=True)
        spec.submodule_search_locations = [f"{folder}/_dynamo" for folder in path]
        return spec


class _StandInLoader(Loader):
    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _StandIn


class _LoaderOfOne(Loader):
    """Loads the module that is `there`, and leaves it as it is."""

    def __init__(self, there: ModuleType) -> None:
        self._there, self._spec = there, there.__spec__

    def create_module(self, _spec: ModuleSpec) -> ModuleType:
        return self._there

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _StandIn(ModuleType):
    """The decorators that say how a function is to be compiled return it as it is. All else is the compiler's."""

    def disable(self, fn: Any = None, *_: object, **_options: object) -> Any:
        return self.allow_in_graph if fn is None else fn

    def allow_in_graph(self, fn: Any) -> Any:
        return fn

    assume_constant_result = allow_in_graph

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system asks for these
            raise AttributeError(name)
        return getattr(_import_compiler(), name)


def _import_compiler() -> ModuleType:
    if isinstance(sys.modules.get(COMPILER), _StandIn):
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        del sys.modules[COMPILER]
    return importlib.import_module(COMPILER)


def _answer_that_nothing_is_sharded() -> None:
    """Ask transformers whether torch.distributed is there: it remembers the answer for the life of the process."""
    import torch  # noqa: PLC0415 - transformers has imported it
    from transformers.utils.import_utils import is_torch_distributed_available  # noqa: PLC0415

    is_available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        is_torch_distributed_available()
    finally:
        torch.distributed.is_available = is_available
