"""Tests that tokens on disk are read as they were written, and that any damage of the file is reported."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm.training.data import token_file
from swarm.training.data.corpus import Corpus
from swarm.training.data.token_file import BLOCK_BYTES, TokenFile, TokenWriter, read_header
from swarm.training.run.run_tables import DataConfig
from swarm_protocol.errors import ConfigError, IntegrityError

CONFIG = DataConfig(source="files", window_tokens=16)


def write(path: Path, train: list[np.ndarray], validation: list[np.ndarray], vocab_size: int = 1000) -> TokenFile:
    writer = TokenWriter(path, vocab_size)
    for tokens in train:
        writer.add(tokens, held_out=False)
    for tokens in validation:
        writer.add(tokens, held_out=True)
    header = writer.finish()
    writer.close()
    file = TokenFile(path)
    assert file.header == header == read_header(path)
    return file


def draw(num_tokens: int, vocab_size: int = 1000, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, num_tokens)


@pytest.mark.parametrize(("vocab_size", "item_bytes"), [(256, 1), (257, 2), (65_536, 2), (65_537, 4)])
def test_read_gives_the_written_tokens_in_the_fewest_bytes_that_hold_them(
    tmp_path: Path, vocab_size: int, item_bytes: int
) -> None:
    train, validation = draw(5000, vocab_size), draw(700, vocab_size, seed=1)
    train[:2] = vocab_size - 1
    file = write(tmp_path / "a", [train[:1], train[1:]], [validation], vocab_size)
    assert file.header.num_bytes == 5700 * item_bytes
    assert np.array_equal(file.read(0, 5000), train)
    assert np.array_equal(file.read(4990, 20), np.concatenate([train[-10:], validation[:10]]))
    assert not (tmp_path / "a.validation").exists()


def test_digest_depends_only_on_tokens_and_split(tmp_path: Path) -> None:
    train, validation = draw(5000), draw(700, seed=1)
    digests = [
        write(tmp_path / "a", [train], [validation]).header.digest,
        write(tmp_path / "b", [train[:99], train[99:]], [validation[:3], validation[3:]]).header.digest,
        write(tmp_path / "c", [train[:-1]], [np.concatenate([train[-1:], validation])]).header.digest,
        write(tmp_path / "d", [train], [validation], vocab_size=70_000).header.digest,
        write(tmp_path / "e", [draw(5000, seed=3)], [validation]).header.digest,
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4


def test_batches_of_one_epoch_have_each_window_once(tmp_path: Path) -> None:
    train, validation = draw(1000), draw(100, seed=1)
    corpus = Corpus.of(write(tmp_path / "a", [train], [validation]), CONFIG, seed=3, source="here", remedy="")
    assert corpus.num_samples == 999 // 16
    assert corpus.vocab_size == 1000
    rows = corpus.batch(range(corpus.num_samples))
    assert rows.shape == (62, 17)
    assert rows.dtype.is_signed
    expected = {tuple(train[start : start + 17]) for start in range(0, 62 * 16, 16)}
    assert {tuple(row) for row in rows.tolist()} == expected
    assert not rows.equal(corpus.batch(range(62, 124)))
    assert corpus.batch([70]).equal(corpus.batch([3, 70])[1:])
    assert corpus.validation_batch(0, 2).flatten()[:17].tolist() == validation[:17].tolist()
    assert corpus.validation_batch(5, 9).shape == (1, 17)
    assert corpus.validation_batch(6, 9).shape == (0, 17)
    with pytest.raises(ValueError, match="negative"):
        corpus.batch([-1])


@settings(max_examples=60, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_open_finds_one_wrong_bit_anywhere(tmp_path_factory: pytest.TempPathFactory, place: float, bit: int) -> None:
    path = tmp_path_factory.mktemp("bits") / "a"
    write(path, [draw(2000)], [draw(200, seed=1)])
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="damaged or cut off"):
        TokenFile(path)


@pytest.mark.parametrize("size", [0, 1, 75, 76, 500, 4475, -1])
def test_open_refuses_a_file_that_was_cut(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a"
    write(path, [draw(2000)], [draw(200, seed=1)])
    os.truncate(path, size if size >= 0 else path.stat().st_size - 1)
    with pytest.raises(IntegrityError, match="damaged or cut off"):
        TokenFile(path)


def test_open_reports_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="No such file"):
        TokenFile(tmp_path / "a")


def _big(path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """Return a file of four blocks, of which opening checks one."""
    monkeypatch.setattr(token_file, "CHECKED_AT_ONCE", 1)
    num_tokens = 3 * BLOCK_BYTES // 2
    tokens = write(path, [draw(num_tokens)], [draw(1000, seed=1)])
    return Corpus.of(tokens, CONFIG, seed=3, source="here", remedy="")


def test_batch_checks_a_block_on_reading_that_was_not_checked_on_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    _big(path, monkeypatch)
    with path.open("r+b") as file:
        file.seek(2 * BLOCK_BYTES)
        file.write(b"wrong")
    corpus = Corpus.of(TokenFile(path), CONFIG, seed=3, source="here", remedy="")
    corpus.validation_batch(0, 4)  # in the last block
    with pytest.raises(IntegrityError, match="made again"):
        corpus.batch(range(400))
    assert not path.exists()


def test_batch_raises_an_error_and_no_signal_when_the_file_is_cut_during_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    corpus = _big(path, monkeypatch)
    corpus.batch(range(400))
    os.truncate(path, BLOCK_BYTES)
    with pytest.raises(IntegrityError, match="damaged or cut off") as caught:
        corpus.batch(range(400))
    assert "start again" in caught.value.remedy
    assert not path.exists()


def test_batch_is_unchanged_when_the_file_is_removed_during_training(tmp_path: Path) -> None:
    path = tmp_path / "a"
    corpus = Corpus.of(write(path, [draw(1000)], [draw(100, seed=1)]), CONFIG, seed=3, source="here", remedy="")
    before = corpus.batch(range(62))
    path.unlink()
    assert corpus.batch(range(62)).equal(before)


@pytest.mark.parametrize(("num_train", "num_validation"), [(16, 100), (100, 16), (0, 0)])
def test_write_refuses_too_few_tokens(tmp_path: Path, num_train: int, num_validation: int) -> None:
    tokens = write(tmp_path / "a", [draw(num_train)], [draw(num_validation)])
    with pytest.raises(ConfigError, match=r"here has only (0|16) tokens to"):
        Corpus.of(tokens, CONFIG, seed=3, source="here", remedy="")
