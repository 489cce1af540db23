"""The pages of the documentation site, as text, and those that its build makes from the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def hooks() -> ModuleType:
    return script("hooks")


def script(name: str) -> ModuleType:
    """A file of `docs`, which is in no package."""
    spec = importlib.util.spec_from_file_location(f"site_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(folder: str = "") -> dict[str, str]:
    """The pages below `folder` that people write, by their path in `docs/`."""
    return {path.relative_to(DOCS).as_posix(): path.read_text("utf-8") for path in (DOCS / folder).rglob("*.md")}
