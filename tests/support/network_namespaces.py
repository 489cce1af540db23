"""Two hosts in a separate local network: network namespaces of this machine. Needs root on Linux, and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
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
