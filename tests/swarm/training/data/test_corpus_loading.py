"""Tests how a run's [data] becomes a corpus: tokens are made once, kept, checked, and made again when they are
damaged."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from support.text_models import byte_tokenizer
from swarm.training.data import corpus, source, tokenizing
from swarm.training.data.corpus import Corpus, load_corpus
from swarm.training.data.local_data import LocalData, Progress
from swarm.training.data.source import Passage
from swarm.training.data.token_file import TokenFile, TokenWriter
from swarm.training.data.tokenizer import ByteTokenizer, _end_in_config, check_vocabulary
from swarm.training.data.tokenizing import Job, write_tokens
from swarm.training.run.run_tables import DataConfig
from swarm_protocol.errors import ConfigError, IntegrityError
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

FILES = DataConfig(source="files", window_tokens=16)
END = "<end>"


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Tokenize in this process instead of in a worker, and return the jobs that workers would have had."""
    done: list[Job] = []

    def tokenize(job: Job, local: LocalData) -> None:
        done.append(job)
        tokenizer = job.tokenizer.load()
        check_vocabulary(tokenizer.vocab_size, job.vocab_size)
        write_tokens(job.source, tokenizer, job.path, local.on_progress)

    monkeypatch.setattr(corpus, "tokenize", tokenize)
    return done


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    folder = tmp_path / "stories"
    folder.mkdir()
    for index in range(100):
        (folder / f"{index:03}.txt").write_text(f"Geschichte {index}: " + f"Es war ein König, {index} Jahre alt.\n" * 5)
    return folder


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    """Write a tokenizer of bytes in another order, with a special token between documents."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": END})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def load(path: Path | None, config: DataConfig = FILES, *, vocab_size: int = 0, **local: object) -> Corpus:
    cache = path.parent / "cache" if path else None
    return load_corpus(
        config, seed=3, vocab_size=vocab_size, local=LocalData(**{"path": path, "cache": cache, **local})
    )


def both(path: Path) -> tuple[list[int], list[int]]:
    """Return all tokens that are kept beside `path`, for training and for validation."""
    file = TokenFile(next((path.parent / "cache").glob("*.tokens")))
    tokens = file.read(0, file.header.num_train + file.header.num_validation).tolist()
    return tokens[: file.header.num_train], tokens[file.header.num_train :]


def test_load_keeps_documents_whole_and_in_order_and_each_on_one_side_of_the_split(
    jobs: list[Job], stories: Path
) -> None:
    load(stories)
    train, validation = (bytes(tokens).decode().split("\0")[:-1] for tokens in both(stories))
    texts = [path.read_text() for path in sorted(stories.iterdir())]
    assert 0 < len(validation) < 20
    assert sorted(train + validation) == sorted(texts)
    assert [text for text in texts if text in set(train)] == train
    assert not set(train) & set(validation)


def test_load_gives_the_same_corpus_when_the_same_data_is_in_another_folder(
    jobs: list[Job], stories: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere" / "my stories"
    shutil.copytree(stories, elsewhere)
    first, second = load(stories), load(elsewhere)
    assert len(jobs) == 2
    assert first.digest == second.digest
    assert first.batch(range(40)).equal(second.batch(range(40)))
    (elsewhere / "050.txt").write_text("other")
    assert load(elsewhere).digest != first.digest


def test_load_holds_out_the_end_of_a_single_long_document(jobs: list[Job], tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(book := "Es war einmal. " * 1000)
    load(tmp_path / "book.txt")
    train, validation = both(tmp_path / "book.txt")
    assert bytes(train + validation).decode() == book + "\0"
    assert len(validation) == len(book + "\0") // 16


def test_load_separates_documents_by_the_tokenizers_end_of_text(
    jobs: list[Job], stories: Path, tokenizer_dir: Path
) -> None:
    corpus = load(stories, replace(FILES, tokenizer="local"), tokenizer=tokenizer_dir, vocab_size=257)
    assert corpus.vocab_size == 257
    train, validation = both(stories)
    assert train.count(256) + validation.count(256) == 100
    assert train[-1] == validation[-1] == 256
    shown = byte_tokenizer().decode(train[: train.index(256)])
    assert shown == (stories / "000.txt").read_text()


def test_load_takes_each_file_of_python_source_as_a_document_with_a_tokenizer(
    jobs: list[Job], corpus_folder: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "standard_library", lambda: corpus_folder)
    config = DataConfig(tokenizer="local", window_tokens=16)
    local = LocalData(tokenizer=str(tokenizer_dir), cache=corpus_folder.parent / "cache")  # type: ignore[arg-type] # no Path
    corpus = load_corpus(config, seed=3, local=local)
    train, validation = both(corpus_folder)
    assert train.count(256) + validation.count(256) == 40
    assert corpus.num_samples == (len(train) - 1) // 16


def test_load_reuses_kept_tokens(jobs: list[Job], stories: Path) -> None:
    reports: list[Progress] = []
    first = load(stories, on_progress=reports.append)
    assert reports[-1].share == 1.0
    assert reports[-1].num_tokens == sum(map(len, both(stories)))
    again = load(stories, on_progress=reports.append)
    assert len(jobs) == len(reports) == 1
    assert again.batch(range(40)).equal(first.batch(range(40)))


def test_load_keeps_tokens_of_another_tokenizer_or_key_separately(
    jobs: list[Job], stories: Path, tokenizer_dir: Path
) -> None:
    load(stories)
    load(stories, replace(FILES, tokenizer="local"), tokenizer=tokenizer_dir)
    (tokenizer_dir / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    load(stories, replace(FILES, tokenizer="local"), tokenizer=tokenizer_dir)
    load(stories, replace(FILES, text_key="body"))
    assert len({job.path for job in jobs}) == 4


def test_load_keeps_the_most_recently_used_tokens_within_its_size_limit(jobs: list[Job], stories: Path) -> None:
    corpora, others = [], [replace(FILES, text_key=key) for key in ("a", "b", "c")]
    for index, config in enumerate([*others, others[0]]):
        corpora.append(load(stories, config))
        os.utime(jobs[-1].path if index < 3 else jobs[0].path, (index, index))
    size = jobs[0].path.stat().st_size
    fourth = load(stories, replace(FILES, text_key="d"), max_cache_bytes=3 * size)
    assert [job.path.exists() for job in jobs] == [True, False, True, True]
    assert corpora[1].batch([0]).equal(fourth.batch([0]))  # an open corpus can still be read
    load(stories, others[2], max_cache_bytes=0)
    assert [job.path.exists() for job in jobs] == [False, False, True, False]
    assert len(jobs) == 4


def test_load_deletes_files_that_killed_workers_left_of_other_data(jobs: list[Job], stories: Path) -> None:
    cache = stories.parent / "cache"
    cache.mkdir()
    for name in ("dead.part", "dead.part.validation", "alive.part"):
        (cache / name).write_bytes(b"tokens")
    with FileLock(cache / "alive.lock"):
        load(stories)
    assert len(jobs) == 1
    assert [path.name for path in cache.iterdir() if ".part" in path.name] == ["alive.part"]


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [_cut, _flip, lambda path: path.write_bytes(b"")])
def test_load_makes_tokens_again_when_kept_ones_are_damaged(
    jobs: list[Job], stories: Path, harm: Callable[[Path], None]
) -> None:
    digest = load(stories).digest
    harm(jobs[0].path)
    assert load(stories).digest == digest
    assert len(jobs) == 2
    load(stories)
    assert len(jobs) == 2


def test_batch_is_unchanged_when_source_files_shrink_or_vanish_during_a_run(jobs: list[Job], stories: Path) -> None:
    corpus = load(stories)
    before = corpus.batch(range(50))
    for index, path in enumerate(stories.iterdir()):
        path.unlink() if index % 2 else path.write_text("")
    assert corpus.batch(range(50)).equal(before)


def test_load_needs_no_source_when_pinned_tokens_are_kept(jobs: list[Job], stories: Path) -> None:
    digest = load(stories).digest
    shutil.rmtree(stories)
    assert load(stories, replace(FILES, digest=digest)).digest == digest
    assert len(jobs) == 1
    with pytest.raises(ConfigError, match="stories cannot be read"):
        load(stories)


@pytest.mark.parametrize("public", [DataConfig(source="python-stdlib"), DataConfig(source="hub", hub_id="some/set")])
def test_load_refuses_tokens_of_own_files_when_the_run_names_public_data(
    jobs: list[Job], stories: Path, public: DataConfig
) -> None:
    """A volunteer would otherwise give strangers gradients of its private files."""
    digest = load(stories).digest
    config = replace(public, tokenizer="local", digest=digest)
    with pytest.raises(ConfigError, match="tokenizer"):
        load_corpus(config, seed=3, local=LocalData(cache=stories.parent / "cache"))


def test_load_refuses_data_that_differs_from_the_pinned_digest(jobs: list[Job], stories: Path) -> None:
    with pytest.raises(
        IntegrityError, match=r"tokens of .*stories are not the run's: \w{12} instead of 0{12}"
    ) as caught:
        load(stories, replace(FILES, digest="0" * 64))
    assert "the same data and the same tokenizer" in caught.value.remedy


def test_load_refuses_a_tokenizer_with_more_tokens_than_the_model(
    jobs: list[Job], stories: Path, tokenizer_dir: Path
) -> None:
    config = replace(FILES, tokenizer="local")
    for _ in range(2):  # before tokens are made, and once they are kept
        with pytest.raises(ConfigError, match="tokenizer has 257 tokens and the model 256") as caught:
            load(stories, config, tokenizer=tokenizer_dir, vocab_size=256)
        assert "vocab_size to 257" in caught.value.remedy
        load(stories, config, tokenizer=tokenizer_dir, vocab_size=257)
    with pytest.raises(ConfigError, match="tokenizer has 256 tokens and the model 100"):
        load_corpus(DataConfig(), seed=0, vocab_size=100)


@pytest.mark.parametrize(
    ("config", "local", "told"),
    [
        (FILES, {}, "each member's own files"),
        (replace(FILES, tokenizer="local"), {"path": "x"}, "tokenizer is each member's own"),
        (replace(FILES, tokenizer="local"), {"path": "x", "tokenizer": "x"}, "holds no tokenizer"),
        (FILES, {"path": "x", "tokenizer": "x"}, "tokenizer is bytes, so .* is not used"),
        (DataConfig(), {"path": "x"}, "trains on the standard library, so .* is not used"),
        (DataConfig(source="hub", hub_id="a/b"), {"path": "x"}, "trains on the data set a/b, so .* is not used"),
    ],
)
def test_load_refuses_local_settings_that_do_not_fit_the_run(
    tmp_path: Path, config: DataConfig, local: dict[str, str], told: str
) -> None:
    (tmp_path / "x").mkdir()
    paths = {name: tmp_path / value for name, value in local.items()}
    with pytest.raises(ConfigError, match=told):
        load_corpus(config, seed=0, local=LocalData(**paths, cache=tmp_path / "cache"))


def test_load_refuses_a_tokenizer_that_training_cannot_use(jobs: list[Job], stories: Path, tokenizer_dir: Path) -> None:
    config = replace(FILES, tokenizer="local")
    (tokenizer_dir / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no tokenizer that can be read"):
        load(stories, config, tokenizer=tokenizer_dir)


def test_load_accepts_a_tokenizer_without_special_tokens(jobs: list[Job], stories: Path, tmp_path: Path) -> None:
    """Swarm exports such a tokenizer for byte models, with the end of text in the model's config."""
    place, config = tmp_path / "plain", replace(FILES, tokenizer="local")
    byte_tokenizer().save_pretrained(place)
    load(stories, config, tokenizer=place)
    train, validation = both(stories)
    assert len(train) + len(validation) == sum(path.stat().st_size for path in stories.iterdir())
    jobs[-1].path.unlink()
    (place / "config.json").write_text('{"eos_token_id": [7, 8]}')
    load(stories, config, tokenizer=place)
    train, validation = both(stories)
    assert train.count(7) + validation.count(7) == 100
    assert train[-1] == validation[-1] == 7


@pytest.mark.parametrize(("begin", "num_begins"), [("<begin>", 100), (END, 0)])
def test_load_begins_each_document_as_the_tokenizer_begins_a_text_unless_it_ends_the_same_way(
    jobs: list[Job], stories: Path, tokenizer_dir: Path, begin: str, num_begins: int
) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    tokenizer.add_special_tokens([begin])
    begin_id = tokenizer.token_to_id(begin)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A {END}", special_tokens=[(begin, begin_id), (END, 256)]
    )
    tokenizer.save(str(tokenizer_dir / "tokenizer.json"))
    (stories / "long.txt").write_text("Es war einmal ein König.\n" * 10_000)
    (stories / "000.txt").unlink()
    load(stories, replace(FILES, tokenizer="local"), tokenizer=tokenizer_dir)
    train, validation = both(stories)
    tokens = train + validation
    assert tokens.count(256) == 100
    if num_begins:
        assert tokens[0] == begin_id
        assert tokens.count(begin_id) == num_begins
        afterwards = [after for end, after in pairwise(tokens) if end == 256]
        assert set(afterwards) == {begin_id}


def test_load_neither_cuts_nor_pads_texts_as_the_tokenizers_last_user_did(
    jobs: list[Job], stories: Path, tokenizer_dir: Path
) -> None:
    config = replace(FILES, tokenizer="local")
    whole = load(stories, config, tokenizer=tokenizer_dir)
    saved = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    saved.enable_truncation(20)
    saved.enable_padding(length=30)
    saved.save(str(tokenizer_dir / "tokenizer.json"))
    assert load(stories, config, tokenizer=tokenizer_dir).digest == whole.digest
    assert len(jobs) == 2


@pytest.mark.parametrize("named", ["[]", '{"eos_token_id": 256}', '{"eos_token_id": "</s>"}', "{", "[" * 100_000])
def test_tokenizer_has_no_end_of_text_when_its_config_names_an_impossible_one(tmp_path: Path, named: str) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(named)
    assert _end_in_config(tmp_path, 256) is None


def test_load_accepts_a_tokenizer_file_in_place_of_its_directory(
    jobs: list[Job], stories: Path, tokenizer_dir: Path, tmp_path: Path
) -> None:
    """The file may lie beside its config, or alone under another name."""
    config = replace(FILES, tokenizer="local")
    whole = load(stories, config, tokenizer=tokenizer_dir)
    assert load(stories, config, tokenizer=tokenizer_dir / "tokenizer.json").digest == whole.digest
    assert len(jobs) == 1
    shutil.copyfile(tokenizer_dir / "tokenizer.json", tmp_path / "words.json")
    alone = load(stories, config, tokenizer=tmp_path / "words.json")
    assert alone.vocab_size == 257
    assert alone.digest != whole.digest, "without a config no end of text separates documents"


def test_load_uses_the_users_cache_when_none_is_named(
    jobs: list[Job], stories: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    for _ in range(2):
        load(stories, cache=None)
    assert [job.path.parent for job in jobs] == [tmp_path / "user" / "swarm" / "tokens"]
    assert jobs[0].path.parent.stat().st_mode & 0o077 == 0, "other users can read the tokens, which are the text"


def test_write_tokens_waits_with_a_message_while_another_process_writes_and_uses_its_tokens(tmp_path: Path) -> None:
    path, reports, waits = tmp_path / "a.tokens", list[Progress](), threading.Event()

    def report(progress: Progress) -> None:
        reports.append(progress)
        waits.set()

    other = threading.Thread(target=write_tokens, args=(_Endless(), ByteTokenizer(), path, report))
    with FileLock(path.with_suffix(".lock")):
        other.start()
        assert waits.wait(30)
        writer = TokenWriter(path, 256)
        writer.add(np.arange(9), held_out=False)
        writer.finish()
        writer.close()
    other.join()
    assert [each.waiting for each in reports] == [True]
    assert TokenFile(path).header.num_train == 9


def test_load_refuses_too_little_text(jobs: list[Job], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("only this")
    with pytest.raises(ConfigError, match=r"a.txt has only 10 tokens to train on"):
        load(tmp_path / "a.txt")


def test_load_reports_a_full_disk_and_leaves_no_file(
    jobs: list[Job], stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: TokenWriter, tokens: object, *, held_out: bool) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tokenizing.TokenWriter, "add", refuse)
    with pytest.raises(ConfigError, match=r"cannot be written to .*cache: the disk is full"):
        load(stories)
    assert [path.suffix for path in (stories.parent / "cache").iterdir()] == [".lock"]


def test_load_refuses_a_cache_folder_that_cannot_be_made(stories: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokens cannot be kept in .*000.txt"):
        load(stories, cache=stories / "000.txt")


class _Endless:
    """Yield 40 million characters in documents of various lengths."""

    name = key = "endless"

    def passages(self) -> Iterator[Passage]:
        for index in range(800):
            yield Passage("x" * 50_000, index % 3 == 0, index / 800)


def test_write_tokens_needs_no_more_memory_when_there_is_more_text(tmp_path: Path) -> None:
    reports: list[Progress] = []
    seconds = iter(range(1000))
    tracemalloc.start()
    try:
        write_tokens(_Endless(), ByteTokenizer(), tmp_path / "a.tokens", reports.append, lambda: float(next(seconds)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert TokenFile(tmp_path / "a.tokens").header.num_bytes == 800 * 50_000 + 267
    assert peak < 24 << 20
    assert [each.share for each in reports] == sorted(each.share for each in reports)
    assert len(reports) > 30
    assert np.isclose(reports[10].tokens_per_s, reports[10].num_tokens / 11)
