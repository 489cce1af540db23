"""`swarm-node models`: lists what a network serves, checks whether a model can be served, and signs and verifies
manifests.

`check` reads the model's config and the headers of its weight files, and no weights. `publish` signs a model's
manifest, and `verify` checks a directory against one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.heap import uncollected
from swarm.router.revisions import short_revision
from swarm.serving.model.shape import MANIFEST_FILE
from swarm_protocol import limits
from swarm_protocol.checks import check_name
from swarm_protocol.errors import ConfigError, SwarmError
from swarm_protocol.identity import Identity
from swarm_protocol.manifest_messages import PublishedManifest

from swarm_node import diagnostics
from swarm_node.commands.chat import soon
from swarm_node.commands.command_options import Flags, say_joining, say_loading, say_lookup, signing_identity
from swarm_node.commands.daemons import check_model_directory
from swarm_node.events.emitter import Emitter
from swarm_node.formatting import plural
from swarm_node.settings.config import UsageError
from swarm_node.settings.parsers import HubId, parse_model
from swarm_node.storage.home import Home, check_new_file, explained
from swarm_node.storage.remembered_peers import join_addrs

if TYPE_CHECKING:
    from swarm.client import Client, ModelStatus, OtherRevision

REPORTED_BYTES = 10**9
"""Progress is shown only above this size of the weights, which takes seconds to read."""

MAX_CONTEXTS = 8
"""Models whose context length is asked for. Each needs its tokenizer, which servers send and this process loads."""

TOKENIZER_FILES = frozenset({"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"})
"""Files of which a model directory has at least one if clients can send the model text."""

HEADS = ("MODEL", "REVISION", "PUBLISHER", "BLOCKS", "SERVERS", "CONTEXT", "")

BlockSpans = Sequence[tuple[int, int]]


def list_models(flags: Flags) -> int:
    config = flags.member()
    peers = join_addrs(config)
    emitter = Emitter(json=flags.json)
    say_joining(config, emitter)
    with uncollected():
        from swarm.client import Client  # noqa: PLC0415

    from swarm_node.storage.client_models import publishers_in  # noqa: PLC0415

    diagnostics.begin_work()
    publishers = publishers_in(Home(config.home).publishers, config.network_id, config.publisher)
    with Client(peers=peers, network_id=config.network_id, publishers=publishers, invite=config.invite) as client:
        models = soon(client.models, "a model", emitter) or ()
        contexts = _contexts(client, [model.name for model in models if not model.missing])
    if flags.json:
        listed = [
            {
                "name": model.name,
                **_of_revision(model),
                "publisher": model.publisher or None,
                "manifest": model.manifest or None,
                "standing": model.standing,
                "dtype": model.dtype or None,
                "context_tokens": contexts.get(model.name),
                "others": [_of_revision(other) for other in model.others],
            }
            for model in models
        ]
        emitter.emit("models", models=listed)
    else:
        emitter.result("\n".join(_lines(models, contexts)) or "no model is served in this network")
    return 0


def _contexts(client: Client, names: Sequence[str]) -> dict[str, int | None]:
    def ask(name: str) -> int | None:
        try:
            return client.context_tokens(name)
        except SwarmError:
            return None

    asked = names[:MAX_CONTEXTS]
    with ThreadPoolExecutor(MAX_CONTEXTS) as threads:
        return dict(zip(asked, threads.map(ask, asked), strict=True))


def served(missing: BlockSpans, num_blocks: int) -> list[tuple[int, int]]:
    """Return the spans between the `missing` ones."""
    edges = [0, *(edge for span in missing for edge in span), num_blocks]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]


def _of_revision(each: ModelStatus | OtherRevision) -> dict[str, object]:
    return {
        "revision": each.revision,
        "num_blocks": each.num_blocks,
        "served": served(each.missing, each.num_blocks),
        "missing": each.missing,
        "num_servers": each.num_servers,
    }


def _lines(models: Sequence[ModelStatus], contexts: Mapping[str, int | None]) -> Iterator[str]:
    rows = [HEADS] if models else []
    for model in models:
        rows.append(
            (model.name, *_cells(model, _publisher(model)), str(contexts.get(model.name) or "-"), _state(model.missing))
        )
        for other in model.others:
            name = f"{model.name}@{short_revision(other.revision)}"
            rows.append((name, *_cells(other, "-"), "-", f"other weights, {_state(other.missing)}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _publisher(model: ModelStatus) -> str:
    """Return the publisher's peer id. It is in brackets if this client has no reason yet to trust it."""
    return {"unpublished": "unpublished", "new": f"({model.publisher})"}.get(model.standing, model.publisher)


def _cells(each: ModelStatus | OtherRevision, publisher: str) -> tuple[str, str, str, str]:
    spans = ", ".join(f"{start}:{end}" for start, end in served(each.missing, each.num_blocks)) or "none"
    return short_revision(each.revision), publisher, f"{spans} of {each.num_blocks}", str(each.num_servers)


def _state(missing: BlockSpans) -> str:
    return f"nobody serves {', '.join(f'{start}:{end}' for start, end in missing)}" if missing else "whole"


def check(flags: Flags) -> int:
    model, home = named_model(flags), Home(flags.home())
    emitter = Emitter(json=flags.json)
    say_loading(emitter)
    from swarm_node.roles.sources import check_served  # noqa: PLC0415

    diagnostics.quieten_libraries()
    say_lookup(model, emitter)
    checked = check_served(model, home)
    lacks = _lacking(model) if isinstance(model, Path) else ""
    if flags.json:
        emitter.emit("model_check", model=model.name, **asdict(checked), lacks=lacks)
        return 0
    blocks = f"{checked.family}, {plural(checked.num_blocks, 'block')}"
    if lacks == "weights":
        emitter.result(
            f"there are no weights in {model}: its config.json describes a model that can be served: {blocks}"
        )
    else:
        emitter.result(f"{model.name} can be served: {blocks}")
    if checked.untried:
        emitter.result(
            f"its blocks cannot be tested from the config alone ({checked.untried}): they are tested when loaded"
        )
    if lacks == "tokenizer":
        emitter.result(f"clients cannot send it text: there is no tokenizer in {model}")
    return 0


def _lacking(directory: Path) -> str:
    """Check the files of a directory, and return what it lacks: "weights", "tokenizer", or "" for neither.

    Raises ConfigError, IntegrityError.
    """
    if not any(directory.glob("*.safetensors*")):
        return "weights"
    from swarm.serving.model.model_files import open_model  # noqa: PLC0415
    from swarm.serving.model.weight_check import check_weights  # noqa: PLC0415

    files = open_model(directory)
    check_weights(files)
    return "tokenizer" if TOKENIZER_FILES.isdisjoint(files.small_files()) else ""


def named_model(flags: Flags) -> Path | HubId:
    """Return the model that MODEL names. Raises ConfigError."""
    named = flags.needed("model", "give a directory, or OWNER/NAME on a hub")
    try:
        model = parse_model(named)
    except ValueError as error:
        raise UsageError(f"{named!r} {error}", remedy="give a directory, or OWNER/NAME on a hub") from error
    if isinstance(model, Path):
        check_model_directory(model, "give the directory of config.json and *.safetensors, or OWNER/NAME on a hub")
    return model


def publish(flags: Flags) -> int:
    model, emitter, out = named_model(flags), Emitter(json=flags.json), flags.options["out"]
    name = publication_name(flags.options["name"] or model.name, "--name")
    if out is not None:
        _check_copy(out, model)
    identity, home = signing_identity(flags), Home(flags.home())
    say_loading(emitter)
    diagnostics.begin_work()
    directory, origin = (model, "") if isinstance(model, Path) else _downloaded(model, home, emitter)
    publish_directory(directory, name, identity, origin=origin, emitter=emitter, copy=out)
    return 0


def publish_directory(
    directory: Path, name: str, identity: Identity, *, origin: str, emitter: Emitter, copy: Path | None = None
) -> PublishedManifest:
    """Sign the manifest of a model and keep it beside the model.

    The copy at `copy` is written first: if that fails, the manifest beside the model stays unchanged. A manifest that
    already says the same is kept. Raises ConfigError, IntegrityError.
    """
    from swarm.serving.manifest.publishing import publish as signed  # noqa: PLC0415
    from swarm.serving.model.model_files import keep_beside, manifest_beside  # noqa: PLC0415

    found = manifest_beside(directory)
    if found is not None and found.publisher != identity.peer_id:
        raise ConfigError(
            f"{directory} already has a manifest, which {found.publisher} signed",
            remedy=f"sign with that key, or remove {MANIFEST_FILE} from the directory first",
        )
    published = signed(
        directory,
        name,
        identity,
        published_at=int(time.time()),
        origin=origin,
        on_bytes=_hashing(name, directory, emitter),
        earlier=found,
    )
    if copy is not None:
        with explained("write", copy, option="--out"):
            copy.write_bytes(published.signed)
    is_kept = published is found
    path = directory / MANIFEST_FILE if is_kept else keep_beside(published, directory)
    emitter.emit(
        "published",
        model=name,
        publisher=published.publisher,
        digest=published.digest.hex(),
        path=str(path),
        is_kept=is_kept,
        how=_how(name, found, is_kept=is_kept),
    )
    return published


def _how(name: str, found: PublishedManifest | None, *, is_kept: bool) -> str:
    """Say what became of the manifest that was `found` beside the model."""
    if is_kept:
        return "is already published, with the same files,"
    if found is not None and found.manifest.name != name:
        return f"is published, in place of {found.manifest.name},"
    return "is published"


def publication_name(name: str, option: str) -> str:
    """Return the name to publish under, given by `option`. Raises UsageError for a name that no model can have."""
    try:
        return check_name(name, "")
    except ValueError:
        raise UsageError(
            f"{option}: a model cannot be published as {name!r:.80}",
            remedy=f"give {option} at most {limits.MAX_NAME_BYTES} letters, digits and ._:@+-, such as {option} story",
        ) from None


def _check_copy(out: Path, model: Path | HubId) -> None:
    """Raise ConfigError or UsageError if no copy of the manifest can be written to `out`."""
    if isinstance(model, Path) and out.absolute().resolve() == (model / MANIFEST_FILE).resolve():
        raise UsageError(
            f"--out: {MANIFEST_FILE} in the model's directory is always written",
            remedy="leave --out out, or name a file elsewhere for a copy",
        )
    check_new_file(out)


def verify(flags: Flags) -> int:
    directory, given, emitter = _directory(flags), flags.resolve().manifest, Emitter(json=flags.json)
    beside = directory / MANIFEST_FILE
    if given is None and not beside.is_file():
        raise ConfigError(
            f"there is no {MANIFEST_FILE} in {directory}", remedy="name the publisher's manifest with --manifest FILE"
        )
    say_loading(emitter)
    from swarm.serving.model.model_files import load_manifest  # noqa: PLC0415

    published = load_manifest(given or beside)
    from swarm.serving.manifest.verification import check_directory  # noqa: PLC0415

    diagnostics.begin_work()
    manifest = published.manifest
    check_directory(directory, published, _hashing(manifest.name, directory, emitter))
    emitter.emit(
        "verified",
        model=manifest.name,
        publisher=published.publisher,
        digest=published.digest.hex(),
        path=str(directory),
        files=manifest.file_names,
    )
    return 0


def _downloaded(model: HubId, home: Home, emitter: Emitter) -> tuple[Path, str]:
    """Download a whole model from its hub. Return its directory and its origin."""
    from swarm.serving.model.model_files import open_model  # noqa: PLC0415

    from swarm_node.roles.sources import ProgressReports, find_source  # noqa: PLC0415

    say_lookup(model, emitter)
    source = find_source(model, home, ProgressReports(partial(emitter.progress, "downloading", model.name)))
    source.fetch_blocks(0, open_model(source.directory).num_blocks)
    return source.directory, open_model(source.directory).source


def _hashing(name: str, directory: Path, emitter: Emitter) -> Callable[[int], None]:
    """Return a callback for numbers of bytes read, which reports the share of a model's weights that was read."""
    from swarm_node.roles.sources import ProgressReports  # noqa: PLC0415

    if (total_bytes := sum(path.stat().st_size for path in directory.glob("*.safetensors"))) < REPORTED_BYTES:
        return lambda _num_bytes: None
    done, reports = 0, ProgressReports(partial(emitter.progress, "hashing", name))

    def on_bytes(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        reports(min(done, total_bytes), total_bytes)

    return on_bytes


def _directory(flags: Flags) -> Path:
    directory: Path = flags.needed("dir", "name the model's directory")
    check_model_directory(directory, "name the directory of config.json and *.safetensors")
    return directory
