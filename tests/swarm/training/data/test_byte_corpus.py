"""Tests that a sample has the same bytes on every machine, and that later changes of the files do no harm."""

from __future__ import annotations

import os
import sysconfig
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from swarm.training.data import source
from swarm.training.data.corpus import Corpus, load_bytes
from swarm.training.run.run_tables import DataConfig
from swarm_protocol.errors import ConfigError, IntegrityError

TINY = DataConfig(window_tokens=16)


def _train(corpus: Corpus) -> NDArray[Any]:
    return corpus.tokens.read(0, corpus.tokens.header.num_train)


def _held_out(corpus: Corpus) -> NDArray[Any]:
    return corpus.tokens.read(corpus.tokens.header.num_train, corpus.tokens.header.num_validation)


def _windows(corpus: Corpus, ids: range) -> list[bytes]:
    return [bytes(row.tolist()) for row in corpus.batch(ids)]


def test_batches_of_one_epoch_have_each_window_once(tiny_corpus: Corpus) -> None:
    text, size = _train(tiny_corpus).tobytes(), tiny_corpus.window_tokens
    expected = Counter(text[start : start + size + 1] for start in range(0, tiny_corpus.num_samples * size, size))
    first = range(tiny_corpus.num_samples)
    second = range(tiny_corpus.num_samples, 2 * tiny_corpus.num_samples)
    assert Counter(_windows(tiny_corpus, first)) == expected
    assert Counter(_windows(tiny_corpus, second)) == expected
    assert _windows(tiny_corpus, first) != _windows(tiny_corpus, second)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(0, 1 << 40), min_size=1, max_size=8))
def test_batch_sample_depends_only_on_its_id(tiny_corpus: Corpus, ids: list[int]) -> None:
    together = tiny_corpus.batch(ids)
    assert together.shape == (len(ids), 17)
    for row, sample_id in zip(together, ids, strict=True):
        assert row.equal(tiny_corpus.batch([sample_id])[0])


def test_batch_refuses_a_negative_id(tiny_corpus: Corpus) -> None:
    with pytest.raises(ValueError, match="negative"):
        tiny_corpus.batch([3, -1])


def test_batch_order_differs_when_the_seed_differs(tiny_corpus: Corpus) -> None:
    other = replace(tiny_corpus, seed=8)
    assert _windows(other, range(20)) != _windows(tiny_corpus, range(20))


def test_load_gives_the_same_corpus_again(tiny_corpus: Corpus, corpus_folder: Path) -> None:
    again = load_bytes(TINY, seed=7, folder=corpus_folder)
    assert again.digest == tiny_corpus.digest
    assert again.batch(range(5)).equal(tiny_corpus.batch(range(5)))


def test_load_splits_by_file_so_that_both_sides_share_no_text(tiny_corpus: Corpus, corpus_folder: Path) -> None:
    files = {path.read_bytes() for path in corpus_folder.rglob("*.py")}
    train = set(_train(tiny_corpus).tobytes().split(b"\0")) - {b""}
    held_out = set(_held_out(tiny_corpus).tobytes().split(b"\0")) - {b""}
    assert train
    assert held_out
    assert train | held_out == files
    assert not train & held_out


def test_validation_batches_cover_the_held_out_text_to_its_end(tiny_corpus: Corpus) -> None:
    text = _held_out(tiny_corpus)
    total = (text.size - 1) // 16
    assert tiny_corpus.validation_batch(0, 2).flatten()[:17].tolist() == text[:17].tolist()
    assert tiny_corpus.validation_batch(total - 1, 5).shape == (1, 17)
    assert tiny_corpus.validation_batch(total, 5).shape == (0, 17)


def test_load_digest_changes_when_content_names_or_boundaries_of_files_change(corpus_folder: Path) -> None:
    digests = [load_bytes(TINY, seed=0, folder=corpus_folder).digest]
    first, second = sorted(corpus_folder.rglob("*.py"))[:2]
    first.write_bytes(first.read_bytes() + second.read_bytes()[:1])
    digests.append(load_bytes(TINY, seed=0, folder=corpus_folder).digest)
    second.write_bytes(second.read_bytes()[1:])
    digests.append(load_bytes(TINY, seed=0, folder=corpus_folder).digest)
    second.rename(second.with_name("another.py"))
    digests.append(load_bytes(TINY, seed=0, folder=corpus_folder).digest)
    assert len(set(digests)) == 4


def test_load_accepts_the_text_of_the_pinned_digest_and_refuses_any_other(corpus_folder: Path) -> None:
    digest = load_bytes(TINY, seed=0, folder=corpus_folder).digest
    load_bytes(replace(TINY, digest=digest), seed=0, folder=corpus_folder)
    next(corpus_folder.rglob("*.py")).write_text("changed")
    with pytest.raises(IntegrityError, match="Python version"):
        load_bytes(replace(TINY, digest=digest), seed=0, folder=corpus_folder)


def test_batch_is_unchanged_when_files_shrink_or_vanish_after_loading(tiny_corpus: Corpus, corpus_folder: Path) -> None:
    before = tiny_corpus.batch(range(50))
    for index, path in enumerate(corpus_folder.rglob("*.py")):
        path.unlink() if index % 2 else path.write_text("")
    assert tiny_corpus.batch(range(50)).equal(before)


def test_load_names_a_file_that_vanishes_during_loading(corpus_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = sorted(source._find(corpus_folder))
    found[3][1].unlink()
    monkeypatch.setattr(source, "_find", lambda root: iter(found))
    with pytest.raises(IntegrityError, match=f"{found[3][1].name} cannot be read: No such file"):
        load_bytes(TINY, seed=0, folder=corpus_folder)


def test_load_names_a_file_that_shrinks_during_loading(corpus_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_fstat = os.fstat

    def grown_fstat(descriptor: int) -> os.stat_result:
        fields = list(real_fstat(descriptor))
        fields[6] += 1  # st_size
        return os.stat_result(fields)

    monkeypatch.setattr(source.os, "fstat", grown_fstat)
    with pytest.raises(IntegrityError, match=r"sums_\d+.py changed while it was read"):
        load_bytes(TINY, seed=0, folder=corpus_folder)


def test_load_refuses_too_little_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only 0 tokens"):
        load_bytes(TINY, seed=0, folder=tmp_path)


def test_load_refuses_too_much_text(corpus_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_CORPUS_BYTES", 20_000)
    with pytest.raises(ConfigError, match="over 20000 bytes"):
        load_bytes(TINY, seed=0, folder=corpus_folder)


def test_load_skips_tests_caches_links_and_other_files(corpus_folder: Path) -> None:
    digest = load_bytes(TINY, seed=0, folder=corpus_folder).digest
    for name in ("test/a.py", "package_1/__pycache__/a.py", "site-packages/a.py", "_sysconfigdata_x.py", "notes.txt"):
        path = corpus_folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x" * 100)
    (corpus_folder / "link.py").symlink_to(next(corpus_folder.rglob("sums_1.py")))
    assert load_bytes(TINY, seed=0, folder=corpus_folder).digest == digest


def test_load_standard_library_has_some_megabytes_of_python() -> None:
    corpus = load_bytes(DataConfig(), seed=0)
    assert _train(corpus).size > 4_000_000
    assert 0.01 < _held_out(corpus).size / _train(corpus).size < 0.2
    source = Path(sysconfig.get_path("stdlib"), "json", "decoder.py").read_bytes()
    assert source in _train(corpus).tobytes() + _held_out(corpus).tobytes()
    assert _train(corpus).dtype == np.uint8
