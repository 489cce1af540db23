"""Starts child processes that cannot read congestion marks of UDP sockets (Linux), so that the libp2p daemon cannot
use QUIC.

go-libp2p always enables QUIC, and dials the QUIC addresses that peers send it by identify, whatever addresses this
process gives it. Its QUIC library (quic-go 0.40.0) has known vulnerabilities that such a peer could exploit. No flag of
the daemon turns QUIC off, but a seccomp filter does: `setsockopt` fails with EACCES for the options by which a socket
reports the congestion marks (ECN) of received packets. The QUIC library sets these options on each of its sockets, and
gives up a socket on which it can set neither that of IPv4 nor that of IPv6. No other code in the daemon sets them, not
even that which asks a router for a port by UDP. The filter is installed in a separate thread, from which the child
inherits it. The thread then ends, so this process is not affected.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import platform
import struct
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_ARCHITECTURES = {"x86_64": (0xC000003E, 54), "aarch64": (0xC00000B7, 208)}
"""By machine: the kernel's number of the architecture, and that of the system call `setsockopt`."""

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EACCES
_AT_NUMBER, _AT_ARCHITECTURE = 0, 4
_AT_LEVEL, _AT_OPTION = 24, 32
"""The offsets of the arguments of `setsockopt` in the filter's input."""
_IPPROTO_IP, _IP_RECVTOS, _IPPROTO_IPV6, _IPV6_RECVTCLASS = 0, 13, 41, 66

logger = logging.getLogger(__name__)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def without_quic(start: Callable[[], T]) -> T:
    """Call `start` in a thread whose child processes cannot read congestion marks. If the system does not allow the
    filter, call it without one."""

    def start_filtered() -> T:
        if sys.platform == "linux":
            _install()
        return start()

    with ThreadPoolExecutor(1, thread_name_prefix="start without QUIC") as thread:
        return thread.submit(start_filtered).result()


def _install() -> None:
    """Filter the system calls of this thread and its children. The filter cannot be removed."""
    known = _ARCHITECTURES.get(platform.machine())
    if known is None:
        logger.debug("no filter of system calls for %s", platform.machine())
        return
    architecture, setsockopt_call = known
    # the kernel's classic BPF; a jump gives the number of instructions to skip
    instructions = (
        (_LOAD, 0, 0, _AT_ARCHITECTURE),
        (_IF_EQUAL, 0, 9, architecture),
        (_LOAD, 0, 0, _AT_NUMBER),
        (_IF_EQUAL, 0, 7, setsockopt_call),
        (_LOAD, 0, 0, _AT_LEVEL),
        (_IF_EQUAL, 3, 0, _IPPROTO_IPV6),
        (_IF_EQUAL, 0, 4, _IPPROTO_IP),
        (_LOAD, 0, 0, _AT_OPTION),
        (_IF_EQUAL, 3, 2, _IP_RECVTOS),
        (_LOAD, 0, 0, _AT_OPTION),
        (_IF_EQUAL, 1, 0, _IPV6_RECVTCLASS),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    )
    program = _Program(len(instructions), b"".join(struct.pack("=HBBI", *each) for each in instructions))
    libc = ctypes.CDLL(None, use_errno=True)
    is_set = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    if not is_set or libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        logger.warning(
            "this system does not let a process filter system calls (errno %d), so peers can have the libp2p daemon "
            "use QUIC",
            ctypes.get_errno(),
        )
