"""Network namespaces of this machine: two hosts in a separate local network, or a loopback device of one's own whose
packets can be dropped. Needs root on Linux, and iproute2; dropping needs iptables, too."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    name: str

    def command(self, *arguments: str) -> tuple[str, ...]:
        """Return the command that runs another one inside."""
        return ("ip", "netns", "exec", self.name, *arguments)

    @property
    def resolver(self) -> Path:
        """Return the file that is /etc/resolv.conf inside."""
        return Path("/etc/netns", self.name, "resolv.conf")


_CLONE_NEWNET = 0x40000000


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


def skip_unless_allowed() -> None:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root on Linux, and iproute2")
    try:
        ip("netns", "add", f"swarm-probe-{os.getpid()}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine allows no network namespaces: {error.stderr.decode().strip()}")
    ip("netns", "delete", f"swarm-probe-{os.getpid()}")


@contextmanager
def local_network(*addresses: Sequence[str]) -> Iterator[tuple[Namespace, Namespace]]:
    """Connect two hosts that each have these addresses, such as 192.168.77.1/24."""
    skip_unless_allowed()
    hosts = tuple(Namespace(name=f"swarm-{os.getpid()}-{number}") for number in range(2))
    try:
        for host in hosts:
            ip("netns", "add", host.name)
            ip("-n", host.name, "link", "set", "lo", "up")
        one, other = hosts
        ip("link", "add", "eth0", "netns", one.name, "type", "veth", "peer", "name", "eth0", "netns", other.name)
        for host, own in zip(hosts, addresses, strict=True):
            for address in own:
                # without this, an IPv6 address is unusable for a second, while the system checks that it is unique
                ip("-n", host.name, "address", "add", address, "dev", "eth0", *(("nodad",) if ":" in address else ()))
            ip("-n", host.name, "link", "set", "eth0", "up")
        yield one, other
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host.name], check=False, capture_output=True, timeout=10)
            shutil.rmtree(host.resolver.parent, ignore_errors=True)


@contextmanager
def own_loopback() -> Iterator[None]:
    """Move this thread, and the processes that it starts meanwhile, to a network that has only a loopback device."""
    skip_unless_allowed()
    if shutil.which("iptables") is None:
        pytest.skip("dropping packets needs iptables")
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open() as before:
        if libc.unshare(_CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        try:
            ip("link", "set", "lo", "up")
            yield
        finally:
            libc.setns(before.fileno(), _CLONE_NEWNET)


@contextmanager
def dropping(ports: Collection[int]) -> Iterator[None]:
    """Drop what goes to or from these TCP ports, so that nobody gets a reset."""
    rules = [("-p", "tcp", side, str(port), "-j", "DROP") for port in ports for side in ("--dport", "--sport")]
    _change("-A", rules)
    try:
        yield
    finally:
        _change("-D", rules)


def _change(action: str, rules: Sequence[Sequence[str]]) -> None:
    lines = "".join(f"{action} INPUT {' '.join(rule)}\n" for rule in rules)
    restore = ["iptables-restore", "--noflush", "--wait"]
    subprocess.run(restore, input=f"*filter\n{lines}COMMIT\n", text=True, check=True, capture_output=True, timeout=10)
