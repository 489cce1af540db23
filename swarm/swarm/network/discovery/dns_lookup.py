"""Looks names up in this machine's hosts file, and then in the DNS.

It uses dnspython, whose lookups can be cancelled and bounded in time, unlike those of the C library. dnspython is
imported with the first lookup. `peer_names` interprets the answers. The module has no state and no tasks.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dns.rdatatype import RdataType
    from dns.resolver import Answer

HOSTS_PATH = Path("/etc/hosts")
MAX_HOSTS_BYTES = 1 << 20
"""Maximum bytes of the hosts file that are read: hosts files may contain long blocklists."""

LOCALHOST = "localhost"


class LookupFailed(Exception):
    """The lookup of a name failed. The text is the reason, for a message "NAME: REASON"."""


class DnsLookup:
    """Lookups that take at most `timeout_s` each. `servers`, at `port`, replace the system's name servers."""

    def __init__(
        self, *, timeout_s: float, servers: Sequence[str] = (), port: int = 53, hosts_path: Path = HOSTS_PATH
    ) -> None:
        self._timeout_s = timeout_s
        self._servers = tuple(servers)
        self._port = port
        self._hosts_path = hosts_path

    async def addresses(self, name: str, version: Literal[4, 6]) -> list[str]:
        """Return the IP addresses of a host. Raises LookupFailed."""
        if is_localhost(name):  # RFC 6761: no name server is asked
            return ["127.0.0.1" if version == 4 else "::1"]
        if found := _in_hosts_file(self._hosts_path, name, version):
            return found
        from dns import rdatatype  # noqa: PLC0415 - takes a twentieth of a second

        return [record.to_text() for record in await self._ask(name, rdatatype.A if version == 4 else rdatatype.AAAA)]

    async def texts(self, name: str) -> list[str]:
        """Return the TXT records of a name, each as one text. Raises LookupFailed."""
        from dns import rdatatype  # noqa: PLC0415 - as above

        answer = await self._ask(name, rdatatype.TXT)
        return [b"".join(record.strings).decode("utf-8", "replace") for record in answer]

    async def _ask(self, name: str, kind: RdataType) -> Answer:
        from dns import asyncresolver, exception, resolver  # noqa: PLC0415 - as above

        try:
            asking = asyncresolver.Resolver(configure=not self._servers)
            if self._servers:
                asking.nameservers, asking.port = list(self._servers), self._port
            return await asking.resolve(name, kind, search=True, lifetime=self._timeout_s)
        except resolver.NXDOMAIN:
            raise LookupFailed("there is no such name") from None
        except resolver.NoAnswer:
            raise LookupFailed(f"the name has no {kind.name} record") from None
        except exception.Timeout:
            raise LookupFailed(f"no name server answered within {self._timeout_s:g} s") from None
        except resolver.NoNameservers:
            raise LookupFailed("no name server could answer") from None
        except resolver.NoResolverConfiguration:
            raise LookupFailed("this machine has no name server, see /etc/resolv.conf") from None
        except (exception.DNSException, OSError, EOFError, ValueError) as error:
            raise LookupFailed(f"it cannot be looked up: {' '.join(str(error).split())[:200]}") from None


def is_localhost(name: str) -> bool:
    """Return whether a name always means the machine that uses it: localhost, or a name below it."""
    return name.lower().rstrip(".").rpartition(".")[2] == LOCALHOST


def _in_hosts_file(path: Path, name: str, version: int) -> list[str]:
    try:
        with path.open("rb") as file:
            lines = file.read(MAX_HOSTS_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        address, *names = line.partition("#")[0].split() or [""]
        if name.lower().rstrip(".") in map(str.lower, names):
            try:
                ip = ipaddress.ip_address(address)
            except ValueError:
                continue
            if ip.version == version:
                found.append(str(ip))
    return found
