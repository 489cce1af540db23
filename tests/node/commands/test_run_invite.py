"""`swarm-node run invite` and `run vouch`: whose key they use, what they print, and what they refuse."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from support.training_swarm import AUTHOR, config
from swarm.training.run.run_file import write_run
from swarm_node import cli
from swarm_node.commands import daemons, run_invite
from swarm_node.settings.invitation_words import parse_invite, parse_run_word
from swarm_protocol.errors import ConfigError
from swarm_protocol.identity import Identity
from swarm_protocol.network_invitation import TEXT_PREFIX as NETWORK_PREFIX
from swarm_protocol.run_credentials import MAX_USES, invite_to_run, vouch_for

FRIEND, INVITER = Identity(b"f" * 32), Identity(b"i" * 32)
SHORTLY: dict[str, Any] = {"network_id": "swarm", "now": time.time(), "lifetime_s": 3600.0}
ADDR = f"/ip4/127.0.0.1/tcp/9/p2p/{FRIEND.peer_id}"


def keys(folder: Path) -> None:
    for name, identity in (("author", AUTHOR), ("friend", FRIEND), ("inviter", INVITER)):
        identity.save(folder / f"{name}.key")


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.run([*map(str, words)])
    told = capsys.readouterr()
    return code, told.out, told.err


@pytest.mark.parametrize(
    ("rule", "has_trained", "continues"),
    [("welcome", False, True), ("required", False, False), ("required", True, True)],
)
def test_join_reports_an_expired_invitation_before_it_starts(
    rule: str,
    has_trained: bool,
    continues: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(*_arguments: object, **_options: object) -> int:
        return 0

    monkeypatch.setattr(daemons, "live", start)
    run = write_run(tmp_path / "run.toml", config(invitations=rule), AUTHOR)
    if has_trained:
        (tmp_path / "home" / "checkpoints" / run.run_id).mkdir(parents=True)
    words: list[str] = []
    for issued_s in (7200, 3000):
        invitation = invite_to_run(
            AUTHOR, run.run_id, network_id="swarm", now=time.time() - issued_s, lifetime_s=3600.0
        )
        words += ["--invitation", invitation.text()]
        flags = ("join", "--home", tmp_path / "home", "--run", tmp_path / "run.toml", "--peers", ADDR, *words)
        code, _, err = call(capsys, *flags)
        is_expired = issued_s == 7200
        assert (f"the invitation to {run.run_id} has expired" in err) is is_expired, "one valid invitation is enough"
        assert code == (0 if continues or not is_expired else 1)


@pytest.mark.parametrize("key", ["author", "inviter"])
def test_invitation_is_the_only_output_and_is_in_no_event(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys(tmp_path)
    run = write_run(tmp_path / "run.toml", config(inviters=(INVITER.peer_id,)), AUTHOR)
    words = ("run", "invite", tmp_path / "run.toml", "--identity", tmp_path / f"{key}.key")
    code, out, err = call(capsys, *words, "--uses", 3, "--expires", "2h")
    assert code == 0
    word = parse_run_word(out.strip())
    assert parse_run_word(f" {out}") == word
    assert word.terms is not None
    assert (word.run, word.terms.max_uses) == (run.run_id, 3)
    assert word.envelope.expires_at - word.envelope.issued_at == 7200
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(word.envelope.expires_at))
    assert f"invitation {word.terms.serial:016x} to {run.run_id} until {until}" in " ".join(err.split())
    assert " the first 3 nodes " in " ".join([*err.split(), ""])
    path = tmp_path / "word"
    code, out, err = call(capsys, *words, "--for-node", FRIEND.peer_id, "--out", path, "--json")
    assert (code, path.stat().st_mode & 0o777) == (0, 0o600)
    [event] = [json.loads(line) for line in out.splitlines()]
    assert (event["event"], event["node"], event["file"]) == ("run_invited", FRIEND.peer_id, str(path))
    assert event["admits"] == f"the node {FRIEND.peer_id}"
    assert path.read_text().strip() not in out + err
    assert parse_run_word(str(path)) == parse_run_word(f"@{path}")
    kept = path.read_bytes()
    code, _, err = call(capsys, *words, "--out", path)
    assert (code, f"{path} exists already" in err, path.read_bytes() == kept) == (1, True, True)


@pytest.mark.parametrize("command", ["invite", "vouch"])
def test_invitation_that_cannot_be_written_is_not_reported_as_signed(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run.toml", config(vouchers=1), AUTHOR)
    AUTHOR.save(tmp_path / "home" / "identity.key")
    (tmp_path / "home" / "checkpoints" / run.run_id).mkdir(parents=True)
    monkeypatch.setattr(run_invite, "check_new_file", lambda _path: None)  # as on a disk that becomes full only then
    words = ("--home", tmp_path / "home", "--for-node", FRIEND.peer_id, "--out", tmp_path, "--json")
    code, out, err = call(capsys, "run", command, tmp_path / "run.toml", *words)
    assert (code, f"cannot write {tmp_path}" in err) == (1, True)
    assert [json.loads(line)["event"] for line in out.splitlines()] == ["error"]


def test_vouch_names_the_newcomer_and_carries_the_member_s_signature(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys(tmp_path)
    run = write_run(tmp_path / "run.toml", config(vouchers=2), AUTHOR)
    home = tmp_path / "home"
    home.mkdir()
    INVITER.save(home / "identity.key")
    (home / "checkpoints" / run.run_id).mkdir(parents=True)
    code, out, err = call(capsys, "run", "vouch", tmp_path / "run.toml", "--home", home, "--for-node", FRIEND.peer_id)
    assert code == 0, err
    word = parse_run_word(out.strip())
    assert (word.run, word.envelope.peer_id) == (run.run_id, INVITER.peer_id)
    assert word.envelope.subject.endswith(FRIEND.peer_id)
    assert "the run requires 2 of these" in err


@pytest.mark.parametrize("kept", [None, "checkpoints", "identity.key.votes"])
def test_vouch_is_signed_only_in_a_home_that_trained_the_run(
    kept: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run.toml", config(vouchers=2), AUTHOR)
    home = tmp_path / "home"
    home.mkdir()
    INVITER.save(home / "identity.key")
    if kept:
        (home / kept / run.run_id).mkdir(parents=True)
    code, out, err = call(capsys, "run", "vouch", tmp_path / "run.toml", "--home", home, "--for-node", FRIEND.peer_id)
    assert (code, bool(out)) == ((0, True) if kept else (1, False))
    assert (
        f"error: {home} holds nothing of {run.run_id}: only a member that has trained the run can vouch" in err
    ) == (not kept)


@pytest.mark.parametrize(
    ("changes", "words", "code", "reason"),
    [
        ({}, ("invite", "--identity", "friend.key"), 1, "may not invite to"),
        ({"invitations": "none"}, ("invite", "--identity", "author.key"), 1, "does not accept invitations"),
        ({}, ("invite", "--identity", "author.key", "--uses", "0"), 2, "--uses"),
        ({}, ("invite", "--identity", "author.key", "--uses", str(MAX_USES + 1)), 2, "--uses"),
        ({}, ("invite", "--identity", "author.key", "--expires", "9999d"), 2, "--expires"),
        ({}, ("invite", "--identity", "author.key", "--for-node", "nobody"), 2, "--for-node"),
        (
            {},
            ("invite", "--identity", "author.key", "--uses", "2", "--for-node", FRIEND.peer_id),
            2,
            "cannot be combined",
        ),
        ({}, ("invite", "--identity", "missing.key"), 1, "there is no identity file"),
    ],
)
def test_useless_invitation_is_not_signed(
    changes: dict[str, object],
    words: tuple[str, ...],
    code: int,
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys(tmp_path)
    write_run(tmp_path / "run.toml", config(**changes), AUTHOR)
    given = [str(tmp_path / word) if word.endswith(".key") else word for word in words[1:]]
    got, out, err = call(capsys, "run", words[0], tmp_path / "run.toml", *given)
    assert (got, out) == (code, "")
    assert reason in err


def test_useless_vouch_is_not_signed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = tmp_path / "home"
    home.mkdir()
    INVITER.save(home / "identity.key")
    for number, (changes, words, reason) in enumerate(
        (
            ({}, ("--for-node", FRIEND.peer_id), "cannot vouch"),
            ({"vouchers": 1}, (), "--for-node is missing"),
            ({"vouchers": 1}, ("--for-node", INVITER.peer_id), "names this node itself"),
        )
    ):
        path = tmp_path / f"run{number}.toml"
        write_run(path, config(**changes), AUTHOR)
        code, out, err = call(capsys, "run", "vouch", path, "--home", home, *words)
        assert (bool(code), out) == (True, "")
        assert reason in err


def test_unreadable_invitation_or_vouch_is_refused_without_being_repeated(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"\xff\xfe")
    (tmp_path / "long").write_text("swarmrun1-" + "A" * 5000)
    # an invitation without its beginning, as from a half copied line, is no file's name either
    cut_off = ("A" * 300, "un1-" + "A" * 300, "A/" * 3000)
    for text in ("swarmrun1-AAAA", str(tmp_path / "none"), str(tmp_path / "bad"), str(tmp_path / "long"), *cut_off):
        with pytest.raises(ConfigError) as caught:
            parse_run_word(text)
        assert "AAAA" not in str(caught.value)
        assert len(str(caught.value)) < 500
    with pytest.raises(ConfigError, match=r"neither a file nor an invitation.*copy the whole line"):
        parse_run_word(cut_off[0])


def test_invitation_of_the_other_kind_is_refused_with_its_option(tmp_path: Path) -> None:
    keys(tmp_path)
    run = write_run(tmp_path / "run.toml", config(), AUTHOR)
    (tmp_path / "word").write_text(vouch_for(AUTHOR, run.run_id, FRIEND.peer_id, **SHORTLY).text())
    with pytest.raises(ConfigError, match=r"word: this is an invitation to a run, or a vouch: .* --invitation"):
        parse_invite(str(tmp_path / "word"))
    with pytest.raises(ConfigError, match="this is an invitation to a private network: give it with --invite"):
        parse_run_word(NETWORK_PREFIX + "AAAA")


@pytest.mark.parametrize(
    ("run", "network_id", "node", "said"),
    [
        ("other", "swarm", "", r"to the run {other}, not to {run}\n.*give --invitation one to {run}"),
        ("run", "else", "", r"for the network else, not for swarm\n.*--invitation"),
        ("run", "swarm", FRIEND.peer_id, r"is for another node\n.*--invitation"),
    ],
)
def test_join_refuses_an_invitation_that_is_not_for_it_before_it_takes_its_home(
    run: str, network_id: str, node: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {name: write_run(tmp_path / f"{name}.toml", config(name=name), AUTHOR).run_id for name in ("run", "other")}
    word = invite_to_run(AUTHOR, runs[run], **{**SHORTLY, "network_id": network_id}, node=node)
    words = ("join", "--home", tmp_path / "home", "--invitation", word.text(), "--peers", ADDR, "--run")
    for which in (tmp_path / "run.toml", runs["run"]):
        code, out, err = call(capsys, *words, which)
        assert (code, out) == (1, "")
        assert re.search(said.format(**runs), err), err
        assert not (tmp_path / "home").exists()
    code, _, err = call(capsys, *words[:-1])
    assert (code, "no run is named, so --invitation has no effect" in err) == (2, True)


def test_mistyped_option_is_reported_before_the_file_and_the_key_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = ("--home", tmp_path / "none")
    for words, said in (
        (("invite", "--expires", "soon"), "--expires"),
        (("invite", "--expires", "\u0663d"), "--expires"),  # 3 in Arabic digits
        (("invite", "--uses", "many"), "--uses"),
        (("vouch",), "--for-node is missing"),
        (("revoke", "--serial", "0" * 16), "is not the serial of an invitation"),
        (("revoke", "--serial", "\u0663"), "is not the serial of an invitation"),
        (("revoke", "--serial", ",".join(f"{serial:016x}" for serial in range(1, 34))), "33 serials are too many"),
        (("revoke",), "neither --serial nor --inviter"),
    ):
        code, _, err = call(capsys, "run", words[0], tmp_path / "none.toml", *words[1:], *nothing)
        assert (code, said in err) == (2, True), err
    (tmp_path / "story").mkdir()
    code, _, err = call(capsys, "run", "invite", tmp_path / "story", *nothing)
    assert (code, "it is a directory" in err) == (1, True)


def test_command_without_a_key_names_only_the_key_that_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run.toml", config(vouchers=1), AUTHOR)
    for command, takes_identity in (("invite", True), ("vouch", False)):
        words = () if takes_identity else ("--for-node", FRIEND.peer_id)
        code, _, err = call(capsys, "run", command, tmp_path / "run.toml", "--home", tmp_path / "none", *words)
        assert code == 1
        assert "identity --new" not in err, "a new key may neither invite nor vouch"
        assert "name the home that has the key with --home" in err
        assert ("or the key itself with --identity" in err) is takes_identity


def test_revoke_needs_the_author_s_key_and_something_to_revoke(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys(tmp_path)
    write_run(tmp_path / "run.toml", config(), AUTHOR)
    peers = ("--peers", f"/ip4/127.0.0.1/tcp/9/p2p/{FRIEND.peer_id}")
    for key, words, reason in (
        ("friend", ("--serial", "4f0c2d9a51b37e86"), "only that key can revoke"),
        ("author", (), "neither --serial nor --inviter"),
        ("author", ("--serial", "xyz"), "is not the serial"),
        ("author", ("--serial", "4f0c2d9a"), "is not the serial"),  # cut while it was copied
        ("author", ("--inviter", "nobody"), "--inviter"),
    ):
        path = tmp_path / f"{key}.key"
        code, out, err = call(capsys, "run", "revoke", tmp_path / "run.toml", "--identity", path, *peers, *words)
        assert (bool(code), out) == (True, "")
        assert reason in err
