from __future__ import annotations

import errno
import importlib.util
import multiprocessing
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm_protocol.errors import ConfigError, IntegrityError
from swarm_protocol.identity import Identity, check_peer_id, peer_id_of, public_key_of, verify

# libp2p specs, peer-ids/peer-ids.md, "Test vectors": the Ed25519 key; its id as go-libp2p prints it
SPEC_FILE = bytes.fromhex(
    "080112407e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d"
    "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e"
)
SPEC_PEER_ID = "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"
OTHER = Identity.generate()
# the order of the group in which Ed25519 computes (RFC 8032, section 5.1)
GROUP_ORDER = 2**252 + 27742317777372353535851937790883648493


def write_key(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_identity_of_the_specified_key_has_the_specified_peer_id(tmp_path: Path) -> None:
    assert Identity.load(write_key(tmp_path / "key", SPEC_FILE)).peer_id == SPEC_PEER_ID


def test_identity_file_starts_the_libp2p_daemon_with_the_same_peer_id(tmp_path: Path) -> None:
    identity = Identity.generate()
    identity.save(tmp_path / "key")
    # found without importing it, which would take seconds
    package = importlib.util.find_spec("hivemind")
    assert package is not None
    assert package.origin is not None
    daemon = Path(package.origin).parent / "hivemind_cli" / "p2pd"
    # a socket path has at most 108 characters, and tmp_path may be longer
    with tempfile.TemporaryDirectory() as short:
        command = [
            daemon,
            "-id",
            tmp_path / "key",
            "-listen",
            f"/unix{short}/p2pd",
            "-hostAddrs",
            "/ip4/127.0.0.1/tcp/0",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            try:
                said = next(line for line in process.stdout if line.startswith("Peer ID:"))
            finally:
                process.kill()
    assert said.split()[-1] == identity.peer_id


def test_identity_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    identity = Identity.generate()
    identity.save(tmp_path / "key")
    loaded = Identity.load(tmp_path / "key")
    assert loaded.peer_id == identity.peer_id
    assert loaded.sign(b"message") == identity.sign(b"message")


def test_identity_of_the_wrong_seed_length_is_refused() -> None:
    with pytest.raises(ValueError, match="32"):
        Identity(bytes(31))


def test_identity_repr_shows_no_key() -> None:
    assert repr(Identity(bytes(32))) == f"Identity({Identity(bytes(32)).peer_id})"


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_save_makes_a_file_that_only_its_owner_can_read_or_write(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        Identity.generate().save(tmp_path / "home" / "key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "home" / "key").stat().st_mode) == 0o600
    assert names_in(tmp_path / "home") == ["key"]


def test_save_never_writes_the_key_to_a_file_with_wider_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    fsync = os.fsync

    def watch(descriptor: int) -> None:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode):
            seen.append((stat.S_IMODE(status.st_mode), status.st_size, (tmp_path / "key").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watch)
    Identity.generate().save(tmp_path / "key")
    # whole, private and synced before its final name exists
    assert seen == [(0o600, 68, False)]


def test_save_over_an_existing_file_is_refused_and_keeps_it(tmp_path: Path) -> None:
    write_key(tmp_path / "key", SPEC_FILE)
    with pytest.raises(ConfigError, match="exists already"):
        Identity.generate().save(tmp_path / "key")
    assert (tmp_path / "key").read_bytes() == SPEC_FILE
    assert names_in(tmp_path) == ["key"]


def test_save_without_hard_links_places_the_file_and_still_keeps_an_existing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(_source: Path, _target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    identity = Identity.generate()
    identity.save(tmp_path / "key")
    with pytest.raises(ConfigError, match="exists already"):
        Identity.generate().save(tmp_path / "key")
    assert Identity.load(tmp_path / "key").peer_id == identity.peer_id
    assert names_in(tmp_path) == ["key"]


@pytest.mark.parametrize("failing", ["write", "fsync", "link"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_save_on_a_failing_disk_leaves_nothing_and_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, error: int
) -> None:
    def fail(*_arguments: object) -> None:
        raise OSError(error, os.strerror(error))

    if failing == "write":
        monkeypatch.setattr(os, "fdopen", lambda descriptor, _mode: FailingFile(descriptor, error))
    else:
        monkeypatch.setattr(os, failing, fail)
        monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(ConfigError, match=os.strerror(error).lower()) as caught:
        Identity.load_or_create(tmp_path / "key")
    assert caught.value.remedy
    assert names_in(tmp_path) == []


class FailingFile:
    def __init__(self, descriptor: int, error: int) -> None:
        self._descriptor = descriptor
        self._error = error

    def __enter__(self) -> FailingFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def write(self, _data: bytes) -> None:
        raise OSError(self._error, os.strerror(self._error))


def refusal_after(handicap: str, path: Path) -> str:
    """Return the first error of a process that runs `handicap` and cannot create the identity."""
    script = (
        "import os, resource, signal, sys\n"
        "from pathlib import Path\n"
        "from swarm_protocol.errors import ConfigError\n"
        "from swarm_protocol.identity import Identity\n"
        f"{handicap}\n"
        "try:\n"
        "    Identity.load_or_create(Path(sys.argv[1]))\n"
        "except ConfigError as error:\n"
        "    sys.exit(str(error))\n"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", script, path], capture_output=True, text=True, timeout=120, check=False
    )
    assert outcome.returncode == 1, outcome.stderr
    return outcome.stderr


def test_load_or_create_leaves_no_file_when_the_key_cannot_be_written(tmp_path: Path) -> None:
    # the kernel refuses files of more than 10 bytes
    handicap = "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))"
    said = refusal_after(handicap, tmp_path / "key")
    assert said.startswith("cannot write the identity file")
    assert said.count("\n") == 1
    assert names_in(tmp_path) == []


def test_load_or_create_in_a_read_only_home_names_the_remedy() -> None:
    with tempfile.TemporaryDirectory() as home:
        Path(home).chmod(0o555)
        # root may write everywhere, so it becomes nobody
        said = refusal_after("os.geteuid() or os.setuid(65534)", Path(home, "key"))
        assert said.startswith("cannot write the identity file")
        assert ": permission denied: choose a home that has room" in said
        assert names_in(Path(home)) == []


def test_load_or_create_under_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="identity file"):
        Identity.load_or_create(tmp_path / "file" / "key")
    with pytest.raises(ConfigError, match="cannot write the identity file"):
        Identity.generate().save(tmp_path / "file" / "key")


def test_load_or_create_creates_once_and_then_loads(tmp_path: Path) -> None:
    path = tmp_path / "home" / "identity.key"
    assert Identity.load_or_create(path).peer_id == Identity.load_or_create(path).peer_id
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_load_or_create_by_many_processes_at_once_gives_one_identity(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(4) as pool:
        peer_ids = pool.map(created_peer_id, [tmp_path / f"key-{number // 4}" for number in range(32)], chunksize=1)
        pool.close()
        pool.join()
    assert len(set(peer_ids)) == 8
    assert len(names_in(tmp_path)) == 8


def created_peer_id(path: Path) -> str:
    return Identity.load_or_create(path).peer_id


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666, 0o777])
def test_load_of_a_file_open_to_others_is_refused_with_the_command(tmp_path: Path, mode: int) -> None:
    path = write_key(tmp_path / "key", SPEC_FILE, mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 600"):
        Identity.load_or_create(path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        SPEC_FILE[:-1],
        SPEC_FILE + b"\x00",
        b"-----BEGIN OPENSSH PRIVATE KEY-----\n" * 8,
        b"\x08\x00" + SPEC_FILE[2:],
        SPEC_FILE[:-1] + b"\x00",
        bytes(1 << 20),
    ],
    ids=["empty", "short", "long", "ssh", "rsa", "another public half", "large"],
)
def test_load_of_a_malformed_file_is_refused_and_keeps_it(tmp_path: Path, data: bytes) -> None:
    path = write_key(tmp_path / "key", data)
    with pytest.raises(ConfigError, match="not a libp2p Ed25519 private key"):
        Identity.load_or_create(path)
    assert path.read_bytes() == data


def test_load_of_a_missing_file_a_folder_or_a_pipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        Identity.load(tmp_path / "key")
    with pytest.raises(ConfigError):
        Identity.load(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="not a file"):
        Identity.load(tmp_path / "pipe")


@given(seed=st.binary(min_size=32, max_size=32), message=st.binary(max_size=100))
def test_verify_of_a_signature_needs_the_same_peer_message_and_bytes(seed: bytes, message: bytes) -> None:
    identity = Identity(seed)
    signature = identity.sign(message)
    verify(identity.peer_id, message, signature)
    for peer_id, text, proof in (
        (OTHER.peer_id, message, signature),
        (identity.peer_id, message + b"x", signature),
        (identity.peer_id, message, signature[:-1]),
        (identity.peer_id, message, signature + b"\x00"),
        (identity.peer_id, message, OTHER.sign(message)),
    ):
        with pytest.raises(IntegrityError):
            verify(peer_id, text, proof)


def test_verify_of_the_signature_plus_the_group_order_is_refused() -> None:
    identity = Identity.generate()
    signature = identity.sign(b"message")
    scalar = int.from_bytes(signature[32:], "little") + GROUP_ORDER
    with pytest.raises(IntegrityError):
        verify(identity.peer_id, b"message", signature[:32] + scalar.to_bytes(32, "little"))


@given(public_key=st.binary(min_size=32, max_size=32))
def test_peer_id_of_any_key_embeds_it(public_key: bytes) -> None:
    peer_id = peer_id_of(public_key)
    assert peer_id.startswith("12D3KooW")
    assert public_key_of(check_peer_id(peer_id)) == public_key


@pytest.mark.parametrize(
    "text",
    [
        "",
        SPEC_PEER_ID[:-1],
        SPEC_PEER_ID + "1",
        "1" + SPEC_PEER_ID,
        "1" + SPEC_PEER_ID[:-1],
        SPEC_PEER_ID.replace("q", "l"),
        SPEC_PEER_ID.lower(),
        "z" * 52,
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        SPEC_PEER_ID.encode(),
        None,
    ],
)
def test_check_peer_id_refuses_any_other_text(text: object) -> None:
    with pytest.raises(ValueError, match="not an Ed25519 peer id"):
        check_peer_id(text)
