"""The text column of parquet and arrow files, a few rows at a time. pyarrow comes with the extra `swarm-node[data]`.

No file is mapped into memory: one that shrinks meanwhile ends in an error and not in a signal. Blocks; no state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from swarm_protocol.errors import ConfigError, IntegrityError, SwarmError

from swarm.training.data.passages import cut

_ROWS = 256


def read_parquet(file: BufferedReader, path: Path, text_key: str) -> Iterator[tuple[str, bool, float]]:
    """Texts, whether each ends its document, and the share of the file that is read with it."""
    with _in_words(path):
        from pyarrow.parquet import ParquetFile  # noqa: PLC0415

        table = ParquetFile(file, memory_map=False)
        _check_column(table.schema_arrow, path, text_key)
        batches = table.iter_batches(batch_size=_ROWS, columns=[text_key])
        yield from _texts(batches, table.metadata.num_rows, text_key)


def read_arrow(file: BufferedReader, path: Path, text_key: str) -> Iterator[tuple[str, bool, float]]:
    """Either form, file or stream. Compressed feather files are of the first."""
    with _in_words(path):
        from pyarrow import ipc  # noqa: PLC0415

        is_file = file.peek(6)[:6] == b"ARROW1"
        if not is_file:
            reader = ipc.open_stream(file)
            _check_column(reader.schema, path, text_key)
            yield from _texts(reader, 0, text_key)
            return
        table = ipc.open_file(file)
        _check_column(table.schema, path, text_key)
        count = table.num_record_batches
        for index in range(count):
            for text, ends, share in _texts([table.get_batch(index)], 0, text_key):
                yield text, ends, (index + share) / count


def _texts(batches: Any, num_rows: int, text_key: str) -> Iterator[tuple[str, bool, float]]:
    done = 0
    for batch in batches:
        column = batch.column(batch.schema.get_field_index(text_key))
        for start in range(0, len(column), _ROWS):
            rows = column.slice(start, _ROWS).to_pylist()
            done += len(rows)
            share = min(1.0, done / num_rows) if num_rows else 0.0
            for text in rows:
                if text is not None:
                    for piece, ends in cut(text):
                        yield piece, ends, share


def _check_column(schema: Any, path: Path, text_key: str) -> None:
    from pyarrow import types  # noqa: PLC0415

    index = schema.get_field_index(text_key)
    if index < 0:
        names = ", ".join(schema.names[:20])
        raise ConfigError(
            f"{path} has no column {text_key!r}: it has {names}", remedy="the run's data.text_key names the column"
        )
    kind = schema.field(index).type
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise ConfigError(
            f"column {text_key!r} of {path} is {kind} and no text", remedy="the run's data.text_key names the column"
        )


@contextmanager
def _in_words(path: Path) -> Iterator[None]:
    """What pyarrow raises, in one line."""
    try:
        yield
    except SwarmError:
        raise
    except ImportError as error:
        raise ConfigError(f"{path} cannot be read without pyarrow", remedy="pip install 'swarm-node[data]'") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} holds text that is not UTF-8", remedy="correct or remove it") from error
    except Exception as error:  # pyarrow's own have no base but this
        told = " ".join(str(error).split())[:200]
        raise IntegrityError(f"{path} is damaged: {told}", remedy="restore the file") from error
