"""Tests the real process that tokenizes: its reports, its failures, and that it ends with the process that started
it."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from support.text_models import byte_tokenizer
from swarm.training.data import tokenizing
from swarm.training.data.corpus import load_corpus
from swarm.training.data.document_files import File, FileSource
from swarm.training.data.local_data import LocalData, Progress
from swarm.training.data.tokenizer import TokenizerFiles
from swarm.training.data.tokenizing import Job, PreparationStopped, tokenize
from swarm.training.run.run_tables import DataConfig
from swarm_protocol.errors import ConfigError, IntegrityError

FILES = DataConfig(source="files", window_tokens=16)
DEADLINE_S = 60.0


def endless_job(folder: Path) -> Job:
    """Return a job that reads from a pipe to which nobody writes."""
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    source = FileSource(root=folder, files=(File(name="pipe", path=pipe, size=1, changed_ns=0),), text_key="text")
    return Job(source=source, tokenizer=TokenizerFiles.find("bytes", None), path=folder / "a.tokens", vocab_size=0)


def workers_of(pid: int) -> list[psutil.Process]:
    return [each for each in psutil.Process(pid).children() if _is_worker(each)]


def _is_worker(process: psutil.Process) -> bool:
    try:
        return tokenizing.__name__ in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # it has just ended, or its parent has not reaped it yet
        return False


def one_worker_of(pid: int) -> psutil.Process:
    until_s = time.monotonic() + DEADLINE_S
    while not (found := workers_of(pid)):
        assert time.monotonic() < until_s, "no worker was started"
        time.sleep(0.01)
    return found[0]


def test_load_tokenizes_in_a_separate_process(tmp_path: Path) -> None:
    folder, cache = tmp_path / "text", tmp_path / "cache"
    folder.mkdir()
    for index in range(50):
        (folder / f"{index}.txt").write_text(f"Es war {index} mal ein König. " * 50)
    reports: list[Progress] = []
    local = LocalData(path=folder, cache=cache, on_progress=reports.append)
    corpus = load_corpus(FILES, seed=0, local=local)
    assert reports[-1].share == 1.0
    assert reports[-1].num_tokens == sum(path.stat().st_size + 1 for path in folder.iterdir())
    assert reports[-1].tokens_per_s > 0
    assert corpus.batch([0, 1]).shape == (2, 17)
    assert not workers_of(os.getpid())
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".tokens"]


def test_progress_is_reported_once_a_second_and_at_the_end() -> None:
    now_s = 0.0
    reports: list[Progress] = []
    report = tokenizing._Reports(reports.append, lambda: now_s)
    for turn in range(1, 41):
        now_s = turn / 4
        report(turn / 40, turn)
    assert [each.num_tokens for each in reports] == list(range(4, 41, 4))
    report(1.0, 41, at_last=True)
    assert (reports[-1].num_tokens, len(reports)) == (41, 11)


def test_tokenize_raises_the_error_of_the_worker_with_its_type(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"gr\xfc\xdfe")
    with pytest.raises(ConfigError, match="not UTF-8 text") as caught:
        load_corpus(FILES, seed=0, local=LocalData(path=tmp_path / "a.txt", cache=tmp_path / "cache"))
    assert "convert it" in caught.value.remedy


def test_tokenize_leaves_no_process_when_it_is_stopped(tmp_path: Path) -> None:
    part = tmp_path / "a.part"
    with pytest.raises(PreparationStopped):
        tokenize(endless_job(tmp_path), LocalData(stop=part.exists))
    assert not workers_of(os.getpid())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.lock", "pipe"]


def test_worker_loads_a_models_tokenizer_without_torch(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    job = replace(endless_job(tmp_path), tokenizer=TokenizerFiles.find("local", tmp_path / "model"))
    libraries: list[str] = []

    def look() -> bool:
        if (tmp_path / "a.part").exists():  # the worker has begun to write
            libraries.extend(each.path for each in one_worker_of(os.getpid()).memory_maps())
        return bool(libraries)

    with pytest.raises(PreparationStopped):
        tokenize(job, LocalData(stop=look))
    assert any("/tokenizers/" in path for path in libraries)
    assert not any("libtorch" in path for path in libraries), (
        "the worker has loaded torch, which takes seconds and hundreds of MB"
    )


def test_tokenize_raises_integrity_error_when_the_worker_is_killed(tmp_path: Path) -> None:
    watch = threading.Thread(target=lambda: one_worker_of(os.getpid()).kill())
    watch.start()
    with pytest.raises(IntegrityError, match=r"tokenizes .* was ended by SIGKILL"):
        tokenize(endless_job(tmp_path), LocalData())
    watch.join()


def test_tokenize_says_why_the_worker_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "_PROGRAM", "raise RuntimeError('no luck today')")
    with pytest.raises(IntegrityError, match="failed: RuntimeError: no luck today"):
        tokenize(endless_job(tmp_path), LocalData())


def test_worker_ends_when_the_process_that_started_it_ends(tmp_path: Path) -> None:
    job = endless_job(tmp_path)
    program = (
        "import pickle, sys; from swarm.training.data import local_data, tokenizing; "
        "assert 'torch' not in sys.modules, 'which takes seconds and hundreds of MB'; "
        "tokenizing.tokenize(pickle.load(sys.stdin.buffer), local_data.LocalData())"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    assert parent.stdin is not None
    parent.stdin.write(pickle.dumps(job))
    parent.stdin.close()
    child = one_worker_of(parent.pid)
    until_s = time.monotonic() + DEADLINE_S
    while not (tmp_path / "a.part").exists():  # the worker has begun to write
        assert time.monotonic() < until_s
        time.sleep(0.01)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    child.wait(timeout=DEADLINE_S)  # raises if it does not end
