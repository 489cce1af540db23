"""Log lines are bounded, go to one place, and never contain a traceback about logging itself."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
from swarm_node import diagnostics
from swarm_protocol.errors import ConfigError


def test_set_up_sends_libraries_to_the_file_and_our_errors_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = diagnostics.set_up(tmp_path, log_format="human", level="info")
    logging.getLogger("some_library").error("theirs")
    logging.getLogger("swarm.network").info("ours, quiet")
    logging.getLogger("swarm_node.daemon").error("ours, loud")
    logging.getLogger("swarm_node.daemon").debug("ours, silent")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("a warning", stacklevel=1)
    text = path.read_text()
    assert "theirs" in text
    assert "ours, quiet" in text
    assert "a warning" in text
    assert "silent" not in text
    assert capsys.readouterr().err == "ERROR: ours, loud\n"


def test_set_up_twice_writes_each_line_once(tmp_path: Path) -> None:
    diagnostics.set_up(tmp_path, log_format="human", level="info")
    path = diagnostics.set_up(tmp_path, log_format="json", level="debug")
    logging.getLogger("swarm").debug("once")
    [line] = path.read_text().splitlines()
    assert json.loads(line) | {"time": 0} == {"time": 0, "level": "debug", "logger": "swarm", "message": "once"}


def test_log_files_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "MAX_FILE_BYTES", 1000)
    diagnostics.set_up(tmp_path, log_format="human", level="info")
    for number in range(200):
        logging.getLogger("swarm").info("line %d %s", number, "x" * 50)
    files = list(tmp_path.iterdir())
    assert len(files) == 1 + diagnostics.NUM_OLD_FILES
    assert all(file.stat().st_size <= 1000 for file in files)


def test_log_that_logrotate_moves_or_that_is_removed_is_begun_again(tmp_path: Path) -> None:
    path = diagnostics.set_up(tmp_path, log_format="human", level="info")
    lines = logging.getLogger("swarm.tests")
    lines.info("first")
    path.rename(tmp_path / "rotated.log")
    lines.info("second")
    assert "second" in path.read_text()
    path.unlink()
    lines.info("third")
    assert path.read_text().endswith("third\n")
    assert "second" not in (tmp_path / "rotated.log").read_text() + path.read_text()


def test_log_is_begun_again_once_its_directory_is_there_again(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    path = diagnostics.set_up(tmp_path / "log", log_format="human", level="info")
    lines = logging.getLogger("swarm.tests")
    path.parent.rename(tmp_path / "moved")
    lines.info("first")
    path.parent.mkdir()
    lines.info("second")
    assert path.read_text().endswith("second\n")


def test_log_on_a_full_disk_says_so_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "swarm-node.log").symlink_to("/dev/full")
    diagnostics.set_up(tmp_path, log_format="human", level="info")
    for _ in range(3):
        logging.getLogger("swarm").info("lost")
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.endswith(" cannot be written: no space left on device\n")


def test_set_up_in_an_unwritable_place_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "swarm-node.log").mkdir()
    with pytest.raises(ConfigError, match="cannot write the log"):
        diagnostics.set_up(tmp_path, log_format="human", level="info")


def test_keep_traceback_before_and_after_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    error = ValueError("the cause")
    early = diagnostics.keep_traceback(error)
    assert early.parent == tmp_path
    assert "the cause" in early.read_text()
    path = diagnostics.set_up(tmp_path, log_format="json", level="info")
    assert diagnostics.keep_traceback(error) == path
    assert "the cause" in json.loads(path.read_text())["traceback"]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: error code 12 (Cannot allocate memory)"),
        RuntimeError("can't start new thread"),
    ],
    ids=str,
)
def test_lack_of_memory_is_no_bug(error: Exception) -> None:
    told = diagnostics.as_swarm_error(error)
    assert (told.message, diagnostics.exit_code(error)) == ("this process gets no more memory or threads", 1)
    assert "`ulimit -v` or `-u`, or lend less with --max-memory" in told.remedy


def test_lack_of_a_place_for_temporary_files_and_a_full_disk_without_a_name_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/proc/none"])
    with pytest.raises(FileNotFoundError) as error:
        tempfile.gettempdir()
    told = diagnostics.as_swarm_error(error.value)
    assert told.message == "no directory for temporary files can be written"
    assert "TMPDIR" in told.remedy
    told = diagnostics.as_swarm_error(OSError(errno.ENOSPC, "No space left on device"))
    assert told.message == "cannot go on: no space left on device"


def test_quieten_libraries_takes_their_handlers(capsys: pytest.CaptureFixture[str]) -> None:
    library = logging.getLogger("transformers")
    library.addHandler(logging.StreamHandler())
    library.propagate = False
    diagnostics.quieten_libraries()
    assert library.handlers == []
    assert library.propagate


def test_quieten_imports_keeps_warnings_of_transformers_off_the_terminal() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; "  # its import takes most of the time, and says nothing
        "from swarm_node import diagnostics; diagnostics.quieten_imports(); from transformers import AutoConfig; "
        "AutoConfig.for_model('llama', vocab_size=256, bos_token_id=300)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_VERBOSITY"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
