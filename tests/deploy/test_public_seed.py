"""The way to a public seed: what its script writes is what daemons start with, and Caddy leads to the dashboard."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from node.gateway.scripted_client import ScriptedClient
from support.dashboard_swarms import example_source
from support.deploy_commands import DEPLOY, PEER_ID, ROOT, text
from support.free_ports import free_port
from support.node_settings import resolve
from swarm_node.dashboard.app import create_dashboard
from swarm_node.gateway.app import create_app
from swarm_node.settings.config import Config
from swarm_node.storage.remembered_peers import choose_listen

SCRIPT = text("public-seed")
NAME = "seed.example.org"
START_S = 120.0  # imports take 2 s on an idle machine; this is for one that is not
NOT_COMPRESSED = re.findall(r"@pages not path (.+)\n\s*encode @pages", text("Caddyfile"))[0].split()
PROGRAM = str(Path(sys.executable).with_name("swarm-node"))


def settings(role: str, *, domain: str = NAME, peer_id: str = PEER_ID) -> str:
    """The file that the script writes for `role`."""
    [body] = re.findall(rf"cat > /etc/swarm/{role}\.toml <<END\n(.*?)^END$", SCRIPT, flags=re.MULTILINE | re.DOTALL)
    return body.replace("$domain", domain).replace("$peer_id", peer_id)


def resolved(role: str, folder: Path) -> Config:
    path = folder / f"{role}.toml"
    path.write_text(settings(role), encoding="utf-8")
    return resolve({"home": str(folder)}, env={}, file=path)


def refused(*words: str) -> str:
    done = subprocess.run([DEPLOY / "public-seed", *words], capture_output=True, text=True, check=False, timeout=10)
    assert done.returncode == 2
    return done.stderr


def test_a_name_that_is_none_is_refused_before_anything_is_done() -> None:
    for name in ("localhost", "a b.org", "$(id).org", "-x.org", ".org", "x.", "ü.org"):
        assert "is not a " in refused(name)
    assert "usage" in refused()


def test_the_shell_takes_the_script() -> None:
    assert os.access(DEPLOY / "public-seed", os.X_OK)
    subprocess.run(["sh", "-n", DEPLOY / "public-seed"], check=True, timeout=10)


STUBS = {
    **dict.fromkeys(("apt-get", "opt/swarm/bin/pip", "python3", "systemd-sysusers", "ufw"), "exit 0"),
    "runuser": f"echo {PEER_ID}",
    "systemctl": 'echo "$@" >> ROOT/called; [ "$1" != is-enabled ] || [ -e ROOT/etc/swarm/gateway.toml ]',
    "install": 'case "$*" in *--directory*) for path; do case $path in /*) mkdir -p "$path" ;; esac; done ;; esac',
}
"""What the script calls, as shell code, without effect outside of ROOT."""


def run_script(root: Path, domain: str) -> list[str]:
    """Run the script with `root` in front of the folders that it writes. Return the calls of systemctl."""
    for name, code in STUBS.items():
        path = root / name if "/" in name else root / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{code.replace('ROOT', str(root))}\n")
        path.chmod(0o755)
    for folder in ("etc/caddy", "etc/systemd/system"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "called").write_text("")
    script = re.sub(r"(?<![\w.])/(?=(?:etc|opt|var|usr/lib)/)", f"{root}/", SCRIPT)
    command = ["sh", "-c", script, str(DEPLOY / "public-seed"), domain]
    environment = {"PATH": f"{root / 'bin'}:/usr/bin:/bin"}
    subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)
    return (root / "called").read_text().splitlines()


def test_script_keeps_changed_settings_and_a_gateway_in_place_of_the_dashboard(tmp_path: Path) -> None:
    calls = run_script(tmp_path, NAME)
    written = tmp_path / "etc" / "swarm"
    assert {path.name: path.read_text() for path in written.iterdir()} == {
        f"{role}.toml": settings(role) for role in ("seed", "dashboard")
    }
    assert "restart swarm-node@seed swarm-node@dashboard caddy" in calls
    kept = 'history = "postgresql://swarm@db/swarm"\n'
    for role in ("dashboard", "gateway"):
        (written / f"{role}.toml").write_text(settings("dashboard") + kept)
    calls = run_script(tmp_path, "new.example.net")
    assert (written / "seed.toml").read_text() == settings("seed", domain="new.example.net")
    for role in ("dashboard", "gateway"):
        assert (written / f"{role}.toml").read_text() == settings("dashboard", domain="new.example.net") + kept
    assert calls[-2:] == [f"{do} swarm-node@seed swarm-node@gateway caddy" for do in ("enable", "restart")]


def test_script_replaces_its_own_name_and_none_that_the_operator_wrote(tmp_path: Path) -> None:
    run_script(tmp_path, NAME)
    seed, dashboard = (tmp_path / "etc" / "swarm" / f"{role}.toml" for role in ("seed", "dashboard"))
    own = f'# moved from {NAME}\nhistory = "postgresql://swarm@db.{NAME}/swarm"\ntensorboard = "/data/{NAME}"\n'
    more = f'allowed_hosts = ["{NAME}", "old.{NAME}"]'
    own += f'peers = ["/dns4/{NAME}/tcp/4002"]\n'
    seed.write_text(settings("seed") + own)
    dashboard.write_text(settings("dashboard").replace(f'allowed_hosts = ["{NAME}"]', more) + own)
    run_script(tmp_path, "new.example.net")
    assert seed.read_text() == settings("seed", domain="new.example.net") + own
    expected = settings("dashboard", domain="new.example.net")
    kept = f'allowed_hosts = ["new.example.net", "old.{NAME}"]'
    assert dashboard.read_text() == expected.replace('allowed_hosts = ["new.example.net"]', kept) + own


def test_shellcheck_finds_nothing() -> None:
    shellcheck = shutil.which("shellcheck")
    if not shellcheck:
        pytest.skip("shellcheck is not installed: a shell has parsed the script, no more")
    # the words of $pip are meant to be several
    done = subprocess.run(
        [shellcheck, "--exclude=SC2086", DEPLOY / "public-seed"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_firewall_lets_in_what_listens_and_nothing_else(tmp_path: Path) -> None:
    opened = {int(port) for port in re.findall(r"^ufw allow (\d+)", SCRIPT, flags=re.MULTILINE)}
    seed, dashboard = resolved("seed", tmp_path), resolved("dashboard", tmp_path)
    assert seed.listen == ("/ip4/0.0.0.0/tcp/4001",)
    assert seed.announce == (f"/dns4/{NAME}/tcp/4001",)
    assert dashboard.host == "127.0.0.1"
    assert all(address.startswith("/ip4/127.") for address in choose_listen(dashboard).listen)
    assert opened == {22, 80, 443, 4001}


def test_gateway_in_place_of_the_dashboard_listens_at_a_port_that_the_readme_opens(tmp_path: Path) -> None:
    [lines] = re.findall(r"```toml\n(.*?)```", text("README.md"), flags=re.DOTALL)
    path = tmp_path / "gateway.toml"
    path.write_text(re.sub(r"^listen = .*\n", lines, settings("dashboard"), flags=re.MULTILINE), encoding="utf-8")
    gateway = resolve({"home": str(tmp_path)}, env={}, file=path)
    assert gateway.api_keys == Path("/etc/swarm/keys")
    assert gateway.announce == (f"/dns4/{NAME}/tcp/4002",)
    assert gateway.listen == ("/ip4/0.0.0.0/tcp/4002",), "servers behind a NAT cannot connect to 127.0.0.1"
    assert "sudo ufw allow 4002/tcp" in text("README.md")


def test_caddy_leads_to_the_dashboard_and_not_to_its_numbers(tmp_path: Path) -> None:
    caddyfile = text("Caddyfile")
    dashboard = resolved("dashboard", tmp_path)
    assert re.findall(r"reverse_proxy (\S+)", caddyfile) == [f"{dashboard.host}:{dashboard.port}"]
    assert dashboard.allowed_hosts == (NAME,), "Caddy hands the public name on"
    assert dashboard.trusted_proxies == ("127.0.0.1/32",), "and says who asks"
    assert "respond /metrics 404" in caddyfile
    assert caddyfile.count("{") == caddyfile.count("}")


def test_caddy_compresses_no_path_of_events() -> None:
    """An event that waits for a compressor's buffer comes late: Caddy 2.6, which Debian 12 has, keeps it to the end."""
    apps = (create_app(ScriptedClient()), create_dashboard(example_source(0)))
    described = {path: json.dumps(methods) for app in apps for path, methods in app.openapi()["paths"].items()}
    streams = {path for path, methods in described.items() if "text/event-stream" in methods}
    assert {"/api/v1/events", "/v1/chat/completions"} <= streams
    assert {path for path in streams if not any(fnmatch(path, each) for each in NOT_COMPRESSED)} == set()
    assert text("Caddyfile").count("encode ") == 1


def test_caddy_takes_its_file() -> None:
    caddy = shutil.which("caddy")
    if not caddy:
        pytest.skip("caddy is not installed: its file was read by the test beside this one alone")
    command = [caddy, "adapt", "--validate", "--adapter", "caddyfile", "--config", DEPLOY / "Caddyfile"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    [server] = json.loads(done.stdout)["apps"]["http"]["servers"].values()
    [site] = server["routes"]
    [subroute] = site["handle"]
    steps = {step["handle"][0]["handler"]: (place, step) for place, step in enumerate(subroute["routes"])}
    # whatever the order in the file, Caddy has one of its own
    assert steps["static_response"][0] < steps["reverse_proxy"][0]
    assert steps["static_response"][1]["match"] == [{"path": ["/metrics"]}]
    assert steps["encode"][1]["match"] == [{"not": [{"path": NOT_COMPRESSED}]}]
    assert "match" not in steps["reverse_proxy"][1]


def test_the_name_is_put_in_wherever_it_stands() -> None:
    assert 'sed "s/seed\\.example\\.org/$domain/" deploy/Caddyfile' in SCRIPT
    assert text("Caddyfile").count(NAME) == 1


def test_cloud_init_runs_the_script_with_the_operators_two_values() -> None:
    text_ = text("cloud-init.yaml")
    assert text_.startswith("#cloud-config\n")
    data: dict[str, Any] = yaml.safe_load(text_)
    [values] = data["write_files"]
    [command] = data["runcmd"]
    assert values["content"].split() == [f"NAME={NAME}", "SOURCE=https://git.example.org/swarm.git"]
    assert f". {values['path']};" in command
    path = re.search(r'/opt/swarm-source/(\S+) "\$NAME"$', command)
    assert path
    assert (ROOT / path[1]).is_file()
    assert "git" in data["packages"]


def test_cloud_init_takes_its_file() -> None:
    cloud_init = shutil.which("cloud-init")
    if not cloud_init:
        pytest.skip("cloud-init is not installed: its file was read as YAML alone")
    command = [cloud_init, "schema", "--config-file", DEPLOY / "cloud-init.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def wait_for(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < until, f"{what} within {START_S:.0f} s"
        time.sleep(0.05)


@contextlib.contextmanager
def running(role: str, home: Path, file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The daemon of `role` as the unit starts it; it is there once `status` answers."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
    with (home.with_suffix(".log")).open("wb") as log:
        process = subprocess.Popen(
            [PROGRAM, role, "--home", home, "--config", file], env=environment, stdout=log, stderr=log
        )
    try:
        log = home.with_suffix(".log")
        wait_for(lambda: (home / "control.sock").exists() or process.poll() is not None, f"{role} is not there")
        assert process.poll() is None, log.read_text()
        subprocess.run([PROGRAM, "status", "--json", "--home", home], capture_output=True, check=True, timeout=START_S)
        yield process
    finally:
        process.kill()
        process.wait()


def test_seed_and_dashboard_live_with_what_the_script_writes_and_drain_on_sigterm(tmp_path: Path) -> None:
    """Real daemons, under the name localhost and at ports of their own."""
    seed_home, home = tmp_path / "seed", tmp_path / "dashboard"
    made = subprocess.run(
        [PROGRAM, "identity", "--new", "--home", seed_home], capture_output=True, text=True, check=True, timeout=120
    )
    ports = {port: free_port() for port in ("4001", "8000", "9401", "9402")}
    files = {}
    for role in ("seed", "dashboard"):
        written = settings(role, domain="localhost", peer_id=made.stdout.strip())
        written = re.sub(r"\b(4001|8000|9401|9402)\b", lambda port: str(ports[port[1]]), written)
        files[role] = tmp_path / f"{role}.toml"
        files[role].write_text(written.replace("/var/lib/swarm", str(tmp_path)), encoding="utf-8")
    with (
        running("seed", seed_home, files["seed"]) as seed,
        running("dashboard", home, files["dashboard"]) as dashboard,
    ):
        log = home.with_suffix(".log")
        wait_for(lambda: "read-only" in log.read_text(), "the dashboard is not shown")
        with urllib.request.urlopen(f"http://127.0.0.1:{ports['8000']}/", timeout=120) as page:
            shown = page.read().decode()
        # a visitor is told the public name, not the way that the dashboard itself takes
        assert f"/dns4/localhost/tcp/{ports['4001']}/p2p/{made.stdout.strip()}" in shown
        assert f"/ip4/127.0.0.1/tcp/{ports['4001']}" not in shown
        for process in (dashboard, seed):
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
    assert (home / "history.sqlite").exists()
