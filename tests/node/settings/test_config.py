"""The source of each setting's value, and the messages about invalid ones."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
from support.node_settings import resolve
from support.private_networks import Owner
from swarm.network.traffic import MIN_BYTES_PER_S
from swarm_node.settings import config, parsers
from swarm_node.settings.config import SETTINGS, Setting, UsageError
from swarm_protocol.errors import ConfigError
from swarm_protocol.identity import Identity
from swarm_protocol.run_credentials import invite_to_run

SEED = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWHoK2zDpTB25vHJF4swgbFQqKcK3ruE4pJzSFjXSEDigi"


def takes_zero(setting: Setting) -> bool:
    """Return whether the setting takes 0 as a number."""
    try:
        return isinstance(setting.parse("0"), int | float)
    except (ValueError, ConfigError):
        return False


def told(error: pytest.ExceptionInfo[ConfigError]) -> str:
    return f"{error.value.message} → {error.value.remedy}"


def test_resolve_prefers_later_sources_and_names_them(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('name = "file"\nthreads = 1\ndrain_s = 2.5\nthen_serve = true\n')
    env = {"SWARM_HOME": str(tmp_path), "SWARM_NAME": "env", "SWARM_THREADS": "2"}
    found = resolve({"name": "flag", "device": None}, env=env)
    assert (found.name, found.threads, found.drain_s, found.then_serve) == ("flag", 2, 2.5, True)
    assert found.device == "auto"
    origins = [found.origin(name) for name in ("name", "threads", "drain_s", "device")]
    assert origins == ["--name", "SWARM_THREADS", f"drain_s in {tmp_path / 'config.toml'}", "the default"]


def test_resolve_without_a_home_uses_the_platforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    found = resolve({}, env={})
    assert found.home == tmp_path / "swarm-node"
    assert found.name, "a node must have a name"


def test_resolve_for_a_user_without_a_home_asks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(ConfigError, match="no home directory") as error:
        resolve({}, env={})
    assert "--home" in error.value.remedy


@pytest.mark.parametrize("given", [[SEED, SEED], [f"{SEED},{SEED}"], [f"{SEED} {SEED}"]])
def test_resolve_repeated_setting_is_a_list(given: list[str], tmp_path: Path) -> None:
    assert resolve({"home": str(tmp_path), "peers": given}, env={}).peers == (SEED, SEED)


def test_resolve_lists_in_file_and_environment(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(f'peers = ["{SEED}"]\n')
    env = {"SWARM_LISTEN": "/ip4/127.0.0.1/tcp/1,/ip6/::1/tcp/2"}
    found = resolve({"home": str(tmp_path)}, env=env)
    assert found.peers == (SEED,)
    assert found.listen == ("/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/2")


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ("peeers = []", "unknown setting 'peeers'"),
        ("peeers = []", "did you mean peers?"),
        ("home = '/tmp'", "unknown setting 'home'"),
        ("home = '/tmp'", "config.toml → choose the home with --home or SWARM_HOME"),
        ("peers = 'x'", "peers in"),
        ("threads = [1]", "is not a single value"),
        ("threads = 1.5", "is not a whole number from 0 to 4096"),
        ("threads = true", ": 'true' is not a whole number"),
        ("max_memory = 'lots'", "is not a size such as 6GiB"),
        ("name = ", "is not valid TOML"),
        ("threads = " + "[" * 5000, "is nested too deeply"),
        ("threads = 0x" + "f" * 5000, "more than 64 bits"),
        ("blocks = '4:2'", "is not a span START:END"),
        ("[table]\nx = 1", "unknown setting 'table'"),
        ("qqq = 1", "config.toml → use an option's name from `swarm-node COMMAND --help`, such as max_memory"),
    ],
)
def test_resolve_bad_file_names_file_and_fault(tmp_path: Path, toml: str, expected: str) -> None:
    (tmp_path / "config.toml").write_text(toml)
    with pytest.raises(UsageError) as error:
        resolve({"home": str(tmp_path)}, env={})
    assert expected in told(error)
    assert str(tmp_path / "config.toml") in told(error)


def test_resolve_fails_when_a_named_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no config file"):
        resolve({"home": str(tmp_path)}, env={}, file=tmp_path / "no.toml")
    with pytest.raises(UsageError, match="there is no config file"):
        resolve({"home": str(tmp_path)}, env={"SWARM_CONFIG": str(tmp_path / "no.toml")})
    with pytest.raises(UsageError, match="cannot read"):
        resolve({"home": str(tmp_path)}, env={}, file=tmp_path)


def test_resolve_fails_when_the_default_file_cannot_be_read(tmp_path: Path) -> None:
    for name, why in (("n" * 300, "name too long"), ("n\0", "null byte")):
        with pytest.raises(UsageError, match=f"cannot read .*{why}"):
            resolve({"home": str(tmp_path)}, env={}, file=tmp_path / name)
    with pytest.raises(UsageError, match=r"cannot read .*config\.toml: file name too long"):
        resolve({"home": str(tmp_path / ("n" * 300))}, env={})


def test_resolve_in_another_user_s_home_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "lstat", refuse)
    with pytest.raises(UsageError, match=f"cannot look into the home directory {tmp_path}: permission denied") as error:
        resolve({"home": str(tmp_path)}, env={})
    assert error.value.remedy == "run this command as the user that owns it"


def test_resolve_leaves_variables_in_other_case_alone(tmp_path: Path) -> None:
    found = resolve({"home": str(tmp_path)}, env={"SWARM_NAME": "attic", "swarm_name": "other", "swarm_threads": "2"})
    assert (found.name, found.threads) == ("attic", 0)


@pytest.mark.parametrize("variable", ["SWARM_PEEERS", "SWARM_Peers"])
def test_resolve_unknown_environment_variable_is_refused_with_a_suggestion(variable: str) -> None:
    with pytest.raises(UsageError) as error:
        resolve({}, env={variable: "x"})
    assert told(error) == f"unknown environment variable {variable} → did you mean SWARM_PEERS?"


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("peers", ["/ip4/1.2.3.4/tcp/4001"], "does not end in /p2p/<peer id>"),
        ("peers", ["nonsense"], "does not start with /"),
        ("peers", ["seed.example.org:4001"], "does not start with /"),
        ("peers", ["/dnsaddr/a..b"], "is not a host name"),
        ("listen", ["/ip4/1.2.3.4"], "a port is missing"),
        ("listen", ["/ip4/1.2.3.4/tcp/70000"], "is not a port"),
        ("network_id", "a b", "is not a network id"),
        ("name", "bell\a", "printable"),
        ("device", "gpu", "is not one of auto, cpu, cuda, mps"),
        ("drain_s", "soon", "is not a duration from 0s to 1h, such as 30s or 5m"),
        ("drain_s", "nan", "is not a duration"),
        ("then_serve", "perhaps", "is neither true nor false"),
        ("metrics", "9401", "is not HOST:PORT"),
        ("metrics", "::1:9401", "is not HOST:PORT"),
        ("metrics", "localhost:99999", "is not HOST:PORT"),
        ("otlp", "collector:4318", "is not an address such as"),
        ("max_memory", "9" * 400, "is not a size"),
        ("home", "~no-such-user/node", "there is no user of that name"),
    ],
)
def test_resolve_bad_flag_names_flag_and_fault(flag: str, value: str | list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve({flag: value}, env={})
    assert expected in error.value.message
    assert error.value.message.startswith(f"--{flag.replace('_', '-')}: ")
    assert error.value.remedy


def test_resolve_reports_a_long_bad_value_in_one_line() -> None:
    with pytest.raises(ConfigError) as error:
        resolve({"name": "A" * 10_000}, env={})
    assert len(error.value.message) < 300


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("0", 0), ("4096", 4096), ("6GiB", 6 * 2**30), ("1.5 GB", 1_500_000_000), ("500mb", 500_000_000), ("2tib", 2**41)],
)
def test_resolve_size_with_units_is_in_bytes(text: str, num_bytes: int) -> None:
    assert resolve({"max_memory": text}, env={}).max_memory == num_bytes


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:0", "127.0.0.1", 0), ("attic.example:9401", "attic.example", 9401), ("[::1]:65535", "::1", 65535)],
)
def test_resolve_endpoint_is_host_and_port(text: str, host: str, port: int) -> None:
    found = resolve({}, env={"SWARM_METRICS": text}).metrics
    assert found is not None
    assert (found.host, found.port) == (host, port)


def test_default_text_is_empty_when_there_is_no_default() -> None:
    assert {
        name: config.default_text(name)
        for name in (
            *("listen", "drain_s", "relay_rate", "device", "peers", "max_blocks", "max_upload", "then_serve", "home"),
        )
    } == {
        "listen": "/ip4/127.0.0.1/tcp/0",
        "drain_s": "30s",
        "relay_rate": "100mbit",
        "device": "auto",
        "peers": "",
        "max_blocks": "0",
        "max_upload": "0",
        "then_serve": "",
        "home": "",
    }


def test_resolve_example_of_each_setting_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("invitation").write_text(Owner().invite().text())
    word = invite_to_run(Identity(bytes(32)), "story", network_id="swarm", now=1e9, lifetime_s=60.0)
    Path("alice.invitation").write_text(word.text())
    for name, setting in SETTINGS.items():
        example = setting.example or config.default_text(name)
        assert example, name
        parsed = resolve({name: [example] if setting.many else example}, env={})
        assert parsed.origin(name) == f"--{name.replace('_', '-')}"


ZEROS = [name for name, setting in SETTINGS.items() if setting.metavar and not setting.many and takes_zero(setting)]


def test_help_says_what_0_means_wherever_it_is_allowed() -> None:
    assert [name for name in ZEROS if not re.search(r"(;|\bport|Port) 0: \S", SETTINGS[name].about)] == []


def test_0_means_no_limit_for_every_limit() -> None:
    limits = {name for name in ZEROS if name.startswith("max_")} | {"monthly_traffic", "tokens_per_min"}
    limits = limits - {"max_memory"} | {"requests_per_min"}  # without a limit, a node takes most of the free memory
    assert {name for name in ZEROS if "0: no limit" in SETTINGS[name].about} == limits
    found = resolve({"max_upload": "0", "max_download": "0mbit", "monthly_traffic": "0", "max_memory": "0"}, env={})
    assert (found.max_upload, found.max_download, found.monthly_traffic, found.max_memory) == (0, 0, 0, 0)


@pytest.mark.parametrize("value", ["", "  ", ","])
def test_empty_value_is_a_line_with_what_to_write(value: str) -> None:
    for name, setting in SETTINGS.items():
        if not setting.metavar or (value == "," and not setting.many):
            continue
        with pytest.raises(UsageError) as error:
            resolve({name: [value] if setting.many else value}, env={})
        flag = f"--{name.replace('_', '-')}"
        assert error.value.message == f"{flag} has no value"
        assert re.fullmatch(rf"write {flag} \S.*, or leave it out", error.value.remedy)


def test_empty_variable_counts_as_unset_and_an_empty_list_in_the_file_as_none(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("hours = []\nlisten = []\n")
    found = resolve({"home": str(tmp_path)}, env={"SWARM_NAME": "", "SWARM_ALLOWED_HOSTS": "", "SWARM_THREADS": " "})
    assert (found.hours, found.listen, found.allowed_hosts, found.threads) == ((), (), (), 0)
    assert found.name
    assert found.origin("name") == "the default"
    (tmp_path / "config.toml").write_text('hours = [""]\n')
    with pytest.raises(UsageError, match=r"hours in .* has no value"):
        resolve({"home": str(tmp_path)}, env={})


def test_resolve_remedy_is_written_as_the_setting_was(tmp_path: Path) -> None:
    for toml, flags, env, expected in (
        ("", {"threads": "x"}, {}, "write --threads 4"),
        ("", {}, {"SWARM_BLOCKS": "x"}, "write SWARM_BLOCKS=0:8"),
        ('drain_s = "soon"', {"home": str(tmp_path)}, {}, 'write drain_s = "30s"'),
        ('trusted_proxies = ["caddy"]', {"home": str(tmp_path)}, {}, 'write trusted_proxies = ["127.0.0.1"]'),
    ):
        (tmp_path / "config.toml").write_text(toml)
        with pytest.raises(ConfigError) as error:
            resolve(flags, env=env)
        assert error.value.remedy == expected


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("max_upload", "fast", "--max-upload: 'fast' is not a rate such as 20mbit"),
        ("max_upload", "20", "--max-upload: '20' is not a rate such as 20mbit"),
        ("max_upload", "0.01mbit", "--max-upload: '0.01mbit' is not a rate from 0.1mbit to 1000gbit, nor 0 for no"),
        ("relay_rate", "0", "--relay-rate: '0' is not a rate from 0.1mbit"),
        ("max_upload", "-5mbit", "--max-upload: '-5mbit' is not a rate such as"),
        ("max_download", "50kbit", "--max-download: '50kbit' is not a rate from 0.1mbit"),
        ("max_download", "1e9gbit", "is not a rate such as"),
        ("max_download", "9" * 20 + "gbit", "is not a rate from"),
        ("monthly_traffic", "5MB", "--monthly-traffic: '5MB' is not the traffic of a month from 1GB upwards, nor 0"),
        ("monthly_traffic", "-500GB", "--monthly-traffic: '-500GB' is not a size such as"),
        ("monthly_traffic", "lots", "--monthly-traffic: 'lots' is not a size such as"),
        ("hours", "25:00", "--hours: '25:00' is not a range of hours such as 22:00-07:00"),
        ("hours", "22:00-25:00", "--hours: '22:00-25:00' is not a range of hours: they go from"),
        ("hours", "08:00-08:00", "--hours: '08:00-08:00' is an empty range"),
    ],
)
def test_contradictory_limits_are_refused_with_one_clear_line(name: str, value: str, says: str, tmp_path: Path) -> None:
    given = [value] if name == "hours" else value
    with pytest.raises(ConfigError) as error:
        resolve({"home": str(tmp_path), name: given}, env={})
    assert says in error.value.message
    assert "\n" not in told(error)
    assert error.value.remedy.startswith(f"write --{name.replace('_', '-')} ")


def test_limits_are_read_from_every_source(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('max_upload = "20mbit"\nhours = ["22:00-07:00", "12:00-13:00"]\n')
    found = resolve({"home": str(tmp_path), "max_download": "2.5 MB/s"}, env={"SWARM_MONTHLY_TRAFFIC": "1TB"})
    assert (found.max_upload, found.max_download, found.monthly_traffic) == (2_500_000, 2_500_000, 10**12)
    assert list(map(str, found.hours)) == ["22:00-07:00", "12:00-13:00"]
    assert len(resolve({"home": str(tmp_path), "hours": ["22:00-07:00,12:00-13:00"]}, env={}).hours) == 2
    assert resolve({"home": str(tmp_path / "other")}, env={}).hours == ()
    assert parsers.MIN_BYTES_PER_S == MIN_BYTES_PER_S
