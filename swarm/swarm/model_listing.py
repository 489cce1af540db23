"""transformers lists the names in all its 2,000 model files as it is imported, twice, which is half of its import.

Here it does so once. The state is that of the interpreter: `sys.meta_path`, until the listing is kept.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

LISTING = f"from {__name__} import list_models_once; list_models_once(); "
"""The first statements of a program that may import transformers."""

AFTER_LISTING_IS_DEFINED = "transformers.utils.versions"
"""A module that transformers imports after `transformers.utils.import_utils` and before it lists the names."""


def list_models_once() -> None:
    """Let transformers, if it is imported from now on, reuse its first listing for the second one. For programs."""
    if "transformers" not in sys.modules and not any(isinstance(finder, _AtImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AtImport())


class _AtImport(MetaPathFinder):
    def find_spec(self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None) -> None:
        if fullname == AFTER_LISTING_IS_DEFINED:
            sys.meta_path.remove(self)
            _keep_listing(sys.modules.get("transformers.utils.import_utils"))


def _keep_listing(module: Any) -> None:
    """Keep what the function that lists a folder returns. The folder may be named by a file in it."""
    listed = getattr(module, "create_import_structure_from_path", None)
    if listed is None:  # another version, which may not list at all
        return
    kept = functools.cache(listed)

    @functools.wraps(listed)
    def listing(module_path: str | Path) -> Any:
        path = Path(module_path)
        return kept(str(path.parent if path.is_file() else path))

    module.create_import_structure_from_path = listing
