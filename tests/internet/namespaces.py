"""Network namespaces of Linux: made, entered, asked and removed by their names.

A namespace has interfaces, addresses, routes, packet filters and tracked connections of its own. A thread that enters
one opens its sockets there, and so do the processes that it starts. All of this needs root and Debian's iproute2 and
iptables.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

FOLDER = Path("/run/netns")
PROGRAMS = ("ip", "tc", *(f"{kind}-{what}" for kind in ("iptables", "ip6tables") for what in ("restore", "save")))
CLONE_NEWNET = 0x40000000

_NETLINK_NETFILTER = 12
_DELETE_CONNECTIONS = (1 << 8) | 2
"""NFNL_SUBSYS_CTNETLINK and IPCTNL_MSG_CT_DELETE: without an attribute it deletes all."""
_REQUEST_AND_ACK = 1 | 4

T = TypeVar("T")


class Unavailable(Exception):
    """Raised when this process cannot make network namespaces. The message is one sentence with the reason."""


def run(*command: str, text: str = "") -> str:
    """Return what the command prints when it is given `text` as input. Raises RuntimeError with its error output."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def check_available() -> None:
    """Check that a namespace with a NAT and IPv6 can be made here. Raises Unavailable otherwise."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise Unavailable("the small internet of these tests needs root on Linux")
    if missing := [program for program in PROGRAMS if not shutil.which(program)]:
        raise Unavailable(
            f"the small internet of these tests needs {', '.join(missing)} of Debian's iproute2 and iptables"
        )
    trial = f"swarm-trial-{os.getpid()}"
    try:
        add(trial)
        try:
            filter_packets(trial, "*nat\n-A POSTROUTING -j MASQUERADE\nCOMMIT\n")
            filter_packets(trial, "*filter\n:INPUT ACCEPT\nCOMMIT\n", tables="ip6tables")
            configure(trial, ["addr add 2a44:1020::1/64 dev lo"])
        finally:
            remove(trial)
    except RuntimeError as error:
        raise Unavailable(f"the small internet of these tests cannot be made here: {error}") from None


def add(name: str) -> None:
    run("ip", "netns", "add", name)


def remove(name: str) -> None:
    run("ip", "netns", "del", name)


def named(pattern: str) -> list[str]:
    """Return the names of the namespaces that `pattern` matches as a whole."""
    names = [path.name for path in FOLDER.iterdir()] if FOLDER.is_dir() else []
    return sorted(name for name in names if re.fullmatch(pattern, name))


def processes(name: str) -> list[int]:
    """Return the ids of the processes in a namespace."""
    return [int(pid) for pid in run("ip", "netns", "pids", name).split()]


def enter(name: str) -> None:
    """Move the calling thread, and all processes that it starts from now on, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with (FOLDER / name).open() as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


def inside(name: str, act: Callable[[], T]) -> T:
    """Return what `act` returns in a thread of its own that has entered the namespace."""
    results: list[T] = []
    errors: list[BaseException] = []

    def live() -> None:
        try:
            enter(name)
            results.append(act())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=live)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def configure(name: str, commands: Iterable[str]) -> None:
    """Carry out commands of `ip`, each given without that word, in a namespace."""
    run("ip", "-n", name, "-batch", "-", text="\n".join(commands))


def filter_packets(name: str, rules: str, *, tables: str = "iptables") -> None:
    """Set packet filters of a namespace, in the format of iptables-save. `tables` is ip6tables for IPv6."""
    run("ip", "netns", "exec", name, f"{tables}-restore", text=rules)


def filter_counts(name: str, *, tables: str = "iptables") -> dict[str, int]:
    """Return the bytes that each rule of a namespace's filter table has counted."""
    lines = run("ip", "netns", "exec", name, f"{tables}-save", "-c", "-t", "filter").splitlines()
    rules = [re.fullmatch(r"\[\d+:(\d+)\] (.*)", line) for line in lines]
    return {rule[2]: int(rule[1]) for rule in rules if rule}


def set_kernel(name: str, settings: Mapping[str, int]) -> None:
    """Set values below /proc/sys/net, of which each namespace has its own."""

    def write() -> None:
        for path, value in settings.items():
            Path("/proc/sys/net", path).write_text(str(value))

    inside(name, write)


def forget_connections(name: str) -> None:
    """Empty a namespace's table of tracked connections, and with it the mappings of its NAT."""

    def empty() -> None:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER) as kernel:
            # nlmsghdr: length, type, flags, number, sender; nfgenmsg: any family, version, nothing
            kernel.send(struct.pack("=IHHIIBBH", 20, _DELETE_CONNECTIONS, _REQUEST_AND_ACK, 1, 0, 0, 0, 0))
            _, _, _, _, _, error = struct.unpack_from("=IHHIIi", kernel.recv(4096))
        if error:
            raise OSError(-error, f"cannot empty the connections of {name}")

    inside(name, empty)
