"""Says why a host cannot listen at its addresses: by trying before the libp2p daemon starts, and by its output after.

The daemon itself reports most problems with an address, but shares the port of another host.
"""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from swarm_protocol.errors import StartError


@contextmanager
def claimed_ports(listen: Sequence[str]) -> Iterator[None]:
    """Claim the ports for a daemon that starts while the context lasts. Raises StartError if one is taken, or another
    host that starts has claimed it (Linux). libp2p shares TCP ports (SO_REUSEPORT), so the daemon would start beside
    another host and get only half of the connections."""
    with ExitStack() as claims:
        for addr in dict.fromkeys(listen):
            _, _, host, _, port, *_ = addr.split("/")
            if int(port) and sys.platform == "linux":
                claim = claims.enter_context(socket.socket(socket.AF_UNIX))
                try:
                    claim.bind(f"\0swarm-listens-{host}:{port}")  # no file: the name ends with the socket
                except OSError as error:  # another one is a sandbox's, which may forbid such sockets
                    if error.errno == errno.EADDRINUSE:
                        raise _occupied(f"{host}:{port}") from None
            if (failure := listen_failure(addr)) is not None and failure.errno == errno.EADDRINUSE:
                raise _occupied(f"{host}:{port}")
        yield


def listen_failure(addr: str) -> OSError | None:
    """Return the error of listening at /ip4|ip6/<host>/tcp/<port> on this machine now, or None."""
    _, version, host, _, port, *_ = addr.split("/")
    family = socket.AF_INET if version == "ip4" else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if version == "ip6":  # as libp2p does, since another program may have this port of IPv4
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((host, int(port)))
    except OSError as error:
        return error
    return None


def start_error(output: str, failure: StartError) -> StartError:
    """Return the error for a daemon that ended before it was ready: a known cause in its output, or `failure`."""
    lowered = output.lower()
    if "address already in use" in lowered:
        return _occupied(_inside_brackets(output))
    if "cannot assign requested address" in lowered:
        return StartError(
            f"this machine does not have a listen address: {_inside_brackets(output)}",
            remedy="listen on /ip4/0.0.0.0 or /ip6/::",
        )
    if "bind: invalid argument" in lowered:  # a link-local IPv6 address needs a zone, which a multiaddr lacks
        return StartError(
            f"the system refuses a listen address: {_inside_brackets(output)}",
            remedy="listen on /ip4/0.0.0.0 or /ip6/::, which include link-local addresses",
        )
    if "permission denied" in lowered:
        return StartError(
            f"no permission to listen at the address or to read the identity: {output}",
            remedy="choose a port above 1023",
        )
    return failure


def _occupied(what: str) -> StartError:
    return StartError(f"a listen port is occupied: {what}", remedy="choose another port, or 0 for any free one")


def _inside_brackets(text: str) -> str:
    return text[text.find("[") + 1 : text.rfind("]")] or text
