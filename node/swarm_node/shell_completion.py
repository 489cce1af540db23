"""What a shell offers after `--run` and `--model`: run files and models in the folder that is typed so far.

Where there is none it offers any path, as for other options, so that one gets to the right folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

MAX_OFFERED = 200


def run_files(incomplete: str) -> list[str]:
    return _offered(incomplete, lambda path: path.suffix == ".toml" and path.is_file())


def models(incomplete: str) -> list[str]:
    return _offered(incomplete, lambda path: (path / "config.json").is_file())


COMPLETIONS: Mapping[str, Callable[[str], list[str]]] = {"run": run_files, "model": models}
"""By the name of the setting."""


def _offered(incomplete: str, fits: Callable[[Path], bool]) -> list[str]:
    """Paths as they were begun: `~/` stays, and so does a relative one."""
    above, slash, begun = incomplete.rpartition("/")
    try:
        entries = sorted(Path(above + slash or ".").expanduser().iterdir())
        found = [entry.name for entry in entries if entry.name.startswith(begun) and fits(entry)]
    except (OSError, RuntimeError):  # no such folder, or nobody of that name
        return []
    return [f"{above}{slash}{name}" for name in found[:MAX_OFFERED]]
