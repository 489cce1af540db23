"""Starts child processes that can read no congestion marks of a UDP socket (Linux), so that the libp2p daemon cannot
speak QUIC.

go-libp2p always has QUIC on, and dials QUIC addresses that peers tell it by identify, whatever addresses we name. Its
QUIC library (quic-go 0.40.0) has known faults that such a peer could use. No flag of the daemon turns it off. A seccomp
filter does: `setsockopt` fails with EACCES for the options by which a socket tells the congestion marks (ECN) of what
it receives. The QUIC library asks for these on each of its sockets, and gives a socket up on which it gets neither that
of IPv4 nor that of IPv6; nothing else in the daemon asks for them, not even what asks a router for a port by UDP. The
filter is set in a thread of its own, from which the child inherits it; the thread ends, and this process stays as it
was.
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
"""By machine: what the kernel calls it, and the number of the system call `setsockopt`."""

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EACCES
_AT_NUMBER, _AT_ARCHITECTURE = 0, 4
_AT_LEVEL, _AT_OPTION = 24, 32
"""The places of the arguments of `setsockopt`."""
_IPPROTO_IP, _IP_RECVTOS, _IPPROTO_IPV6, _IPV6_RECVTCLASS = 0, 13, 41, 66

logger = logging.getLogger(__name__)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def without_quic(start: Callable[[], T]) -> T:
    """Call `start` in a thread whose child processes can have no socket tell congestion marks; where that is not
    possible, as it is."""

    def start_filtered() -> T:
        if sys.platform == "linux":
            _install()
        return start()

    with ThreadPoolExecutor(1, thread_name_prefix="start without QUIC") as thread:
        return thread.submit(start_filtered).result()


def _install() -> None:
    """Filter the system calls of this thread and its children; there is no way back."""
    known = _ARCHITECTURES.get(platform.machine())
    if known is None:
        logger.debug("no filter of system calls for %s", platform.machine())
        return
    architecture, setsockopt_call = known
    # the kernel's classic BPF; a jump counts the instructions to leave out
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
            "speak QUIC",
            ctypes.get_errno(),
        )
