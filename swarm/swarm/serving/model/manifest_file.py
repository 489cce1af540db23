"""The file of a published model's signed manifest, `swarm-model.manifest` beside its config and weights. Blocking."""

from __future__ import annotations

from pathlib import Path

from swarm_protocol.errors import ConfigError, reason_of
from swarm_protocol.manifest_messages import PublishedManifest, SignedManifest, readable_manifest

MANIFEST_FILE = "swarm-model.manifest"


def manifest_beside(directory: Path) -> PublishedManifest | None:
    """Return the manifest in a model's directory, or None for a model that is not published. Raises IntegrityError."""
    path = directory / MANIFEST_FILE
    return load_manifest(path) if path.is_file() else None


def load_manifest(path: Path) -> PublishedManifest:
    """Read a signed manifest. Raises ConfigError if there is no such file, IntegrityError if it is not intact."""
    try:
        with path.open("rb") as file:
            data = file.read(SignedManifest.MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the manifest {path} cannot be read: {reason_of(error)}", remedy="check its path") from error
    return readable_manifest(data, str(path))


def keep_beside(published: PublishedManifest, directory: Path) -> Path:
    """Write the manifest into a model's directory, in one step. Raises ConfigError if it cannot."""
    path = directory / MANIFEST_FILE
    partial = path.with_name(f"{path.name}.part")
    try:
        partial.write_bytes(published.signed)
        partial.replace(path)
    except OSError as error:
        raise ConfigError(
            f"the manifest cannot be written to {path}: {reason_of(error)}",
            remedy="make the directory writable, with room on its disk",
        ) from error
    return path
