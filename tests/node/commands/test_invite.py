"""`swarm-node invite`, and how the other commands take an invitation."""

from __future__ import annotations

import errno
import json
import shutil
import stat
import time
from pathlib import Path
from typing import IO, Any

import pytest
from support.node_process import Node
from support.private_networks import Owner
from swarm_node import cli, daemon, network_join
from swarm_node.commands.daemons import _within_rights
from swarm_node.dashboard.view_builder import invitation as shown_invitation
from swarm_node.settings.config import Config
from swarm_node.settings.config_sources import resolve
from swarm_node.storage import kept_invitation, owned_network
from swarm_node.storage.home import Home
from swarm_node.storage.owned_network import OwnedNetwork, with_own_renewed
from swarm_protocol.errors import ConfigError, StartError
from swarm_protocol.identity import Identity
from swarm_protocol.network_invitation import RIGHTS, open_revocations, parse_invitation, serial_text

OWNER = Owner()
PEER = Identity(bytes([3]) * 32).peer_id
SEED = f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"


def invite(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.run(["invite", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_invite_new_network_makes_a_key_and_a_member(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = invite(capsys, "--new-network", "--home", tmp_path)
    assert f"swarm-node seed --home {tmp_path} --listen" in err
    assert f"swarm-node invite --home {tmp_path}" in err
    assert (code, out) == (0, "")
    assert "this home owns the private network private-12D3KooW" in err
    home = Home(tmp_path)
    for path in (home.network_key, home.network, home.invitation):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    kept = kept_invitation.read(home)
    assert kept is not None
    assert set(kept.terms.rights) == {"join", "serve", "train", "ask"}
    code, _, err = invite(capsys, "--new-network", "--home", tmp_path)
    assert code == 1
    assert "owns a private network already" in err


def test_invite_prints_only_the_invitation_and_lists_it_without_its_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    invite(capsys, "--new-network", "--home", tmp_path)
    code, out, err = invite(
        capsys, "--home", tmp_path, "--peers", SEED, "--rights", "ask", "--expires", "2h", "--note", "alice"
    )
    made = parse_invitation(out)
    assert (code, out.count("\n")) == (0, 1)
    assert (made.terms.rights, made.seeds) == (("join", "ask"), (SEED,))
    assert out.strip() not in err
    _, listed, _ = invite(capsys, "list", "--home", tmp_path)
    assert f"{made.terms.serial:016x}  valid " in listed
    assert listed.rstrip().endswith("join,ask  alice")
    _, events, _ = invite(capsys, "list", "--home", tmp_path, "--json")
    assert json.loads(events)["invitations"][-1]["state"] == "valid"
    _, events, err = invite(capsys, "--home", tmp_path, "--peers", SEED, "--json")
    assert "swarm1-" not in events
    assert "swarm1-" in err
    path = tmp_path / "for-bob"
    _, out, _ = invite(capsys, "--home", tmp_path, "--peers", SEED, "--for-node", PEER, "--out", path)
    assert out == ""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert parse_invitation(path.read_text()).holder == PEER


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--rights", "fly"), 2, "'fly' is not a right"),
        (("--expires", "10s"), 2, "--expires: '10s' is not a duration from 1m to 366d, such as 90m, 12h or 30d"),
        (("--expires", "367d"), 2, "is not a duration from 1m to 366d"),
        (("--for-node", "me"), 2, "is not an Ed25519 peer id"),
        (("--note", "a\tb"), 2, "--note is not one line"),
        ((), 1, "names a node to join through"),
        (("revoke", "77"), 1, "no invitation has the serial"),
        (("revoke",), 2, "SERIAL is missing"),
    ],
)
def test_invite_refuses_in_one_line_with_a_remedy(
    arguments: tuple[str, ...], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    invite(capsys, "--new-network", "--home", tmp_path)
    found, out, err = invite(capsys, *arguments, "--home", tmp_path)
    assert (found, out) == (code, "")
    first, remedy = err.strip().splitlines()
    assert first.startswith("error: ")
    assert said in first
    assert remedy.startswith("  → ")


def test_invite_refuses_a_home_without_a_network_or_with_a_broken_book(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, err = invite(capsys, "list", "--home", tmp_path)
    assert "this home owns no private network" in err
    invite(capsys, "--new-network", "--home", tmp_path)
    Home(tmp_path).network.write_text("{}")
    _, _, err = invite(capsys, "list", "--home", tmp_path)
    assert "is missing or broken" in err


def test_invite_with_a_full_book_is_refused_and_keeps_all_revocations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owned_network, "MAX_ISSUED", 4)
    owned = OwnedNetwork.create(Home(tmp_path))  # this one enters the owner's own invitation
    revoked, short = (owned.invite(RIGHTS, lifetime_s=lifetime_s) for lifetime_s in (3600, 60))
    owned.revoke(serial_text(revoked.terms.serial))
    last = owned.invite(RIGHTS, lifetime_s=3600)
    with pytest.raises(ConfigError, match="4 invitations have not expired yet"):
        owned.invite(RIGHTS, lifetime_s=3600)
    later = time.time() + 100
    monkeypatch.setattr(owned_network.time, "time", lambda: later)
    owned.invite(RIGHTS, lifetime_s=3600)
    serials = [int(each.serial, 16) for each in owned.issued]
    assert len(serials) == 4
    assert short.terms.serial not in serials, "the expired one makes room"
    owned.revoke(serial_text(last.terms.serial))
    listed = open_revocations(kept_invitation.read_revocations(Home(tmp_path)), network_id=owned.network_id, now=later)
    assert set(listed.serials) == {revoked.terms.serial, last.terms.serial}


def test_simultaneous_commands_lose_nothing_that_another_has_signed(tmp_path: Path) -> None:
    first = OwnedNetwork.create(Home(tmp_path))
    second = OwnedNetwork(Home(tmp_path))
    serials = [serial_text(each.invite(RIGHTS, lifetime_s=3600).terms.serial) for each in (first, second)]
    assert [each.serial for each in OwnedNetwork(Home(tmp_path)).issued][1:] == serials
    for each, serial in zip((first, second), serials, strict=True):
        each.revoke(serial)
    listed = open_revocations(
        kept_invitation.read_revocations(Home(tmp_path)), network_id=first.network_id, now=time.time()
    )
    assert (listed.number, [serial_text(each) for each in listed.serials]) == (2, serials)


def test_owner_whose_key_is_read_only_invites_and_revokes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, opened = Home(tmp_path), Path.open
    owned = OwnedNetwork.create(home)

    def open_as_a_user(path: Path, mode: str = "r", **options: Any) -> IO[Any]:
        if path == home.network_key and mode != "rb":  # which root could open
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, mode, **options)

    monkeypatch.setattr(Path, "open", open_as_a_user)
    owned.revoke(serial_text(owned.invite(RIGHTS, lifetime_s=3600).terms.serial))
    assert [each.state(time.time()) for each in owned.issued] == ["valid", "revoked"]


def test_older_list_of_revocations_replaces_no_newer_one(tmp_path: Path) -> None:
    """The older list belongs to a daemon in the owner's home that has not seen yet what `swarm-node invite revoke`
    wrote.
    """
    home, other = Home(tmp_path), Owner(seed=20)
    home.create()
    older, newer = OWNER.revoke(1, number=1), OWNER.revoke(1, 2, number=2)
    for revocations, kept in ((b"", b""), (older, older), (newer, newer), (older, newer), (b"", newer), (b"x", newer)):
        kept_invitation.keep_revocations(home, OWNER.network_id, revocations)
        assert kept_invitation.read_revocations(home) == kept
    of_another = other.revoke(3, number=1)
    kept_invitation.keep_revocations(home, other.network_id, of_another)
    assert kept_invitation.read_revocations(home) == of_another, "the home is in another network now"


def test_book_from_a_backup_revokes_with_the_next_list_and_keeps_all_revocations(tmp_path: Path) -> None:
    home = Home(tmp_path)
    owned = OwnedNetwork.create(home)
    known, last = (serial_text(owned.invite(RIGHTS, lifetime_s=3600).terms.serial) for _ in range(2))
    backup = home.network.read_bytes()
    unknown = serial_text(owned.invite(RIGHTS, lifetime_s=3600).terms.serial)
    for serial in (known, unknown):
        owned.revoke(serial)
    home.network.write_bytes(backup)
    OwnedNetwork(home).revoke(last)
    listed = open_revocations(kept_invitation.read_revocations(home), network_id=owned.network_id, now=time.time())
    assert listed.number == 3
    assert {serial_text(each) for each in listed.serials} == {known, unknown, last}
    states = {each.serial: each.state(time.time()) for each in OwnedNetwork(home).issued[1:]}
    assert states == {known: "revoked", last: "revoked"}


def test_revoke_keeps_the_list_for_the_next_node_when_no_member_is_reachable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    invite(capsys, "--new-network", "--home", tmp_path)
    _, out, _ = invite(capsys, "--home", tmp_path, "--peers", SEED)
    serial = f"{parse_invitation(out).terms.serial:016x}"
    code, _, err = invite(capsys, "revoke", serial, "--home", tmp_path)
    assert code == 0
    assert f"invitation {serial} is revoked" in err
    assert "no member has it yet" in err
    assert kept_invitation.read_revocations(Home(tmp_path))
    _, listed, _ = invite(capsys, "list", "--home", tmp_path)
    assert f"{serial}  revoked" in listed


def test_invitation_counts_as_valid_when_its_revocation_is_in_no_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    invite(capsys, "--new-network", "--home", tmp_path)
    _, out, _ = invite(capsys, "--home", tmp_path, "--peers", SEED)
    serial = f"{parse_invitation(out).terms.serial:016x}"
    Home(tmp_path).revocations.mkdir()  # as where the disk is full
    code, _, err = invite(capsys, "revoke", serial, "--home", tmp_path)
    assert code == 1
    assert "cannot keep the list of revocations" in err
    _, listed, _ = invite(capsys, "list", "--home", tmp_path)
    assert f"{serial}  valid" in listed


def test_revoke_searches_once_for_members_when_none_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    visits: list[bytes | None] = []

    def nobody(_config: Config, *, revocations: bytes | None) -> None:
        visits.append(revocations)
        raise StartError("none of the given peers could be reached")

    monkeypatch.setattr(network_join, "visiting", nobody)
    invite(capsys, "--new-network", "--home", tmp_path)
    _, out, _ = invite(capsys, "--home", tmp_path, "--peers", SEED)
    serial = f"{parse_invitation(out).terms.serial:016x}"
    code, _, err = invite(capsys, "revoke", serial, "--home", tmp_path, "--peers", SEED)
    assert code == 0
    assert "no member has it yet: none of the given peers could be reached" in err
    assert visits == [b""]


def test_revoking_the_owner_s_own_invitation_gives_its_nodes_a_new_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    invite(capsys, "--new-network", "--home", tmp_path)
    home = Home(tmp_path)
    serial = OwnedNetwork(home).own_serial
    code, _, err = invite(capsys, "revoke", serial, "--home", tmp_path)
    owned = OwnedNetwork(home)
    assert code == 0
    assert f"now has a new one: {owned.own_serial}" in err
    assert "--invite" in err
    assert [each.state(time.time()) for each in owned.issued] == ["revoked", "valid"]
    config, peer_id = config_with(home=str(tmp_path)), Identity.load(home.identity).peer_id
    kept_invitation.check_member(config, home, peer_id)
    assert with_own_renewed(config, home).invite == config.invite, "it is still valid"


@pytest.mark.parametrize("flaw", ["revoked", "expired"])
def test_owner_s_node_starts_with_a_new_invitation_when_its_own_is_invalid(
    flaw: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path)
    owned = OwnedNetwork.create(home)
    old = kept_invitation.read(home)
    assert old is not None
    if flaw == "revoked":
        owned.revoke(owned.own_serial)
        kept_invitation.keep(home, old)  # the invitation that another node of the owner keeps
    else:
        later = old.expires_at + 1
        monkeypatch.setattr(time, "time", lambda: later)
    config, peer_id = config_with(home=str(tmp_path)), Identity.load(home.identity).peer_id
    with pytest.raises(ConfigError, match=flaw):
        kept_invitation.check_member(config, home, peer_id)
    kept_invitation.check_member(with_own_renewed(config, home), home, peer_id)
    given = config_with(home=str(tmp_path), invite=old.text())
    assert with_own_renewed(given, home) == given, "an invitation that the user names must not be replaced"


@pytest.mark.parametrize("bad", ["swarm1-xyzxyzxyz", "xyz" * 20, "@/nonesuch/file", "/nonesuch/file", "@"])
def test_bad_invitation_is_refused_in_one_line_that_does_not_repeat_it(
    bad: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, name in ((["--invite", bad], "--invite"), ([], "SWARM_INVITE")):
        if name == "SWARM_INVITE":
            monkeypatch.setenv(name, bad)
        assert cli.run(["join", "--home", str(tmp_path), *arguments]) == 2
        error, remedy = capsys.readouterr().err.strip().splitlines()
        assert error.startswith(f"error: {name}: ")
        assert bad.startswith(("@", "/")) or bad not in error
        assert remedy.startswith("  → ")


def config_with(**flags: str) -> Config:
    return kept_invitation.with_invitation(resolve(flags))


def test_settings_use_the_network_and_the_seeds_of_an_invitation(tmp_path: Path) -> None:
    home, text = str(tmp_path), OWNER.invite(seeds=(SEED,)).text()
    config = config_with(home=home, invite=text)
    assert (config.network_id, config.peers) == (OWNER.network_id, (SEED,))
    assert text not in repr(config)
    other = f"/ip4/127.0.0.1/tcp/4002/p2p/{PEER}"
    assert config_with(home=home, invite=text, peers=other).peers == (other,)
    with pytest.raises(ConfigError, match="the invitation is to"):
        config_with(home=home, invite=text, network_id="swarm")
    with pytest.raises(ConfigError, match="is a private network"):
        config_with(home=home, network_id=OWNER.network_id)
    assert config_with(home=home).network_id == "swarm", "nothing is kept before the node has joined"
    kept_invitation.keep(Home(tmp_path), OWNER.invite(seeds=(SEED,)))
    assert config_with(home=home).network_id == OWNER.network_id
    assert config_with(home=home, network_id="swarm").invite is None, "another network of the same home"
    Home(tmp_path).invitation.write_text("swarm1-broken")
    with pytest.raises(ConfigError, match="characters are missing"):
        config_with(home=home)


@pytest.mark.parametrize(
    ("rights", "flags", "expected"),
    [
        (("serve",), {"model": "OWNER/NAME"}, "any"),
        (("train",), {"model": "OWNER/NAME"}, "the right to serve"),
        (("serve",), {"run": "story-0123456789ab"}, "the right to train"),
        (("train",), {"run": "story-0123456789ab", "then_serve": "true"}, "the right to serve"),
        (("train",), {"take": "models"}, "the right to serve"),
        (("serve", "train"), {}, "any"),
        (("serve",), {}, "models"),
        (("train",), {}, "runs"),
        (("ask",), {}, "nothing"),
    ],
)
def test_join_accepts_only_work_that_its_invitation_allows(
    rights: tuple[str, ...], flags: dict[str, str], expected: str, tmp_path: Path
) -> None:
    text = OWNER.invite(*rights, seeds=(SEED,)).text()  # type: ignore[arg-type]
    config = config_with(home=str(tmp_path), invite=text, **flags)
    if expected.startswith("the right"):
        with pytest.raises(ConfigError, match=expected):
            _within_rights(config)
    else:
        assert _within_rights(config).take == expected


@pytest.mark.parametrize("command", [("chat", "story"), ("gateway",)])
def test_client_commands_fail_at_once_when_the_invitation_lacks_the_right(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = OWNER.invite("train", seeds=(SEED,)).text()
    assert cli.run([*command, "--invite", text, "--home", str(tmp_path)]) == 1
    assert "this node's invitation does not have the right to ask" in capsys.readouterr().err
    server = config_with(home=str(tmp_path), invite=OWNER.invite("serve", seeds=(SEED,)).text())
    kept_invitation.check_right(server, "ask", "use the models of others, as a server may")


@pytest.mark.parametrize("flaw", ["expired", "bound to another", "revoked"])
def test_join_with_an_invalid_invitation_ends_before_the_machine_is_measured(
    flaw: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "run", lambda *_: pytest.fail("the daemon was started"))
    invitation = OWNER.invite(
        seeds=(SEED,),
        now=time.time() - (3600 if flaw == "expired" else 0),
        lifetime_s=600,
        node=PEER * (flaw[0] == "b"),
    )
    if flaw == "revoked":
        Home(tmp_path).create()
        kept_invitation.keep_revocations(Home(tmp_path), OWNER.network_id, OWNER.revoke(invitation.terms.serial))
    code = cli.run(["join", "--invite", invitation.text(), "--home", str(tmp_path)])
    told = {"expired": "the invitation has expired", "bound to another": "alone", "revoked": "was revoked"}
    error, remedy = capsys.readouterr().err.strip().splitlines()
    assert (code, told[flaw] in error, remedy[:4]) == (1, True, "  → ")


def test_invitation_overwrites_no_file_and_is_not_signed_when_the_file_exists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    invite(capsys, "--new-network", "--home", tmp_path)
    (tmp_path / "kept").write_text("mine")
    book = Home(tmp_path).network.read_bytes()
    for out, said in ((tmp_path / "kept", "exists already"), (tmp_path / "none/x", "there is no directory")):
        code, _, err = invite(capsys, "--home", tmp_path, "--peers", SEED, "--out", out)
        assert (code, said in err, "choose another --out" in err) == (1, True, True)
    assert ((tmp_path / "kept").read_text(), Home(tmp_path).network.read_bytes()) == ("mine", book)


def test_invitation_s_expiry_is_shown_in_utc(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        invite(capsys, "--new-network", "--home", tmp_path)
        _, out, err = invite(capsys, "--home", tmp_path, "--peers", SEED)
        until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(parse_invitation(out).expires_at))
        assert until in err
        assert until in invite(capsys, "list", "--home", tmp_path)[1]
    finally:
        monkeypatch.undo()
        time.tzset()


def test_dashboard_s_command_to_join_names_no_address_and_no_invitation() -> None:
    assert shown_invitation((SEED,), {}, OWNER.network_id) == "swarm-node join --invite FILE"


def test_private_swarm_of_processes_joins_restarts_and_drops_a_revoked_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One string is the only setting, a restart needs none, and the string is in no log, event or status."""
    owner, home = tmp_path / "owner", tmp_path / "guest"
    invite(capsys, "--new-network", "--home", owner)
    seed = Node("seed", "--no-mdns", home=owner, is_light=True)
    addr = seed.wait_for("ready")["addrs"][0]
    path = tmp_path / "guest.invitation"
    code, other, err = invite(capsys, "--home", owner)
    assert code == 0, err
    restored = tmp_path / "restored"
    shutil.copytree(owner, restored, ignore=shutil.ignore_patterns("*.sock"))
    code, _, err = invite(capsys, "--home", owner, "--rights", "join", "--out", path)
    assert code == 0, err
    text = path.read_text().strip()
    guest = Node("join", "--invite", str(path), "--probe", "off", "--no-mdns", home=home, is_light=True)
    guest.wait_for("ready")
    guest.end()
    path.unlink()
    guest = Node("join", "--probe", "off", "--no-mdns", "--log-level", "debug", home=home, is_light=True)
    guest.wait_for("ready")
    capsys.readouterr()
    assert cli.run(["status", "--home", str(home), "--json"]) == 0
    assert text[20:60] not in capsys.readouterr().out
    serial = f"{parse_invitation(text).terms.serial:016x}"
    code, _, err = invite(capsys, "revoke", serial, "--home", owner)
    assert code == 0
    assert "no member has it yet" not in err
    assert "revoked" in str(guest.wait_for("error", 30.0)["message"])
    guest.wait_end()
    guest.end()
    # the home from a backup does not know it, and has a list with the same number once it has revoked by itself
    last = serial_text(parse_invitation(other).terms.serial)
    code, _, err = invite(capsys, "revoke", last, "--home", restored)
    assert (code, "no member has it yet" in err) == (0, True)
    code, _, err = invite(capsys, "revoke", last, "--home", restored, "--peers", addr)
    assert (code, "no member has it yet" in err) == (0, False)
    listed = kept_invitation.open_kept_revocations(Home(restored), OwnedNetwork(Home(restored)).network_id)
    assert (listed.number, {serial_text(each) for each in listed.serials}) == (2, {serial, last})
    seed.end()
    logs = [each for root in (owner, home) for each in (root / "log").iterdir()]
    logs += [guest.err_path, seed.err_path]
    assert logs
    for each in logs:
        assert text[20:60] not in each.read_text(), each
    assert text[20:60] not in json.dumps([*guest.events, *seed.events])
