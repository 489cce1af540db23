"""Starts child processes that can open no UDP socket, or read no congestion marks of one (Linux), so that the libp2p
daemon cannot speak QUIC.

go-libp2p always has QUIC on, and dials QUIC addresses that peers tell it by identify, whatever addresses we name. Its
QUIC library (quic-go 0.40.0) has known faults that such a peer could use. No flag of the daemon turns it off. A seccomp
filter does: `socket` fails with EACCES for datagrams of IPv4 and IPv6, and the daemon goes on with TCP. The filter is
set in a thread of its own, from which the child inherits it; the thread ends, and this process stays as it was.

A daemon that asks a router for a port does so by UDP. For it there is a narrower filter: `setsockopt` fails for the
options by which a socket tells the congestion marks (ECN) of what it receives. The QUIC library asks for these on each
of its sockets, and gives a socket up on which it gets neither that of IPv4 nor that of IPv6; nothing else in the daemon
asks for them.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import platform
import struct
import sys
import threading
from collections.abc import Callable
from typing import TypeAlias, TypeVar

T = TypeVar("T")

_ARCHITECTURES = {"x86_64": (0xC000003E, 41, 54), "aarch64": (0xC00000B7, 198, 208)}
"""By machine: what the kernel calls it, and the numbers of the system calls `socket` and `setsockopt`."""

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _AND, _IF_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EACCES
_AT_NUMBER, _AT_ARCHITECTURE = 0, 4
_AT_DOMAIN, _AT_TYPE = 16, 24
"""The places of the arguments of `socket`."""
_AT_LEVEL, _AT_OPTION = 24, 32
"""The places of the arguments of `setsockopt`."""
_AF_INET, _AF_INET6, _SOCK_DGRAM, _TYPE_MASK = 2, 10, 2, 0xF
_IPPROTO_IP, _IP_RECVTOS, _IPPROTO_IPV6, _IPV6_RECVTCLASS = 0, 13, 41, 66

_Instruction: TypeAlias = tuple[int, int, int, int]

logger = logging.getLogger(__name__)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def without_datagrams(start: Callable[[], T]) -> T:
    """Call `start` in a thread whose child processes can open no UDP socket; where that is not possible, as it is."""
    return _filtered(start, _no_datagrams)


def without_congestion_marks(start: Callable[[], T]) -> T:
    """Call `start` in a thread whose child processes can have no socket tell congestion marks, which QUIC does not go
    without; where that is not possible, as it is."""
    return _filtered(start, _no_congestion_marks)


def _filtered(start: Callable[[], T], program_for: Callable[[int, int, int], tuple[_Instruction, ...]]) -> T:
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            if sys.platform == "linux":
                _install(program_for)
            outcome.append(start())
        except BaseException as error:  # raised again in the thread that waits
            failure.append(error)

    thread = threading.Thread(target=run, name="start without QUIC")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def _install(program_for: Callable[[int, int, int], tuple[_Instruction, ...]]) -> None:
    """Filter the system calls of this thread and its children; there is no way back."""
    known = _ARCHITECTURES.get(platform.machine())
    if known is None:
        logger.debug("no filter of system calls for %s", platform.machine())
        return
    instructions = b"".join(struct.pack("=HBBI", *instruction) for instruction in program_for(*known))
    program = _Program(len(instructions) // 8, instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    is_set = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    if not is_set or libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        logger.warning(
            "this system does not let a process filter system calls (errno %d), so peers can have the libp2p daemon "
            "speak QUIC",
            ctypes.get_errno(),
        )


def _no_datagrams(architecture: int, socket_call: int, _setsockopt_call: int) -> tuple[_Instruction, ...]:
    """Return the filter in the kernel's classic BPF; a jump counts the instructions to leave out."""
    return (
        (_LOAD, 0, 0, _AT_ARCHITECTURE),
        (_IF_EQUAL, 0, 8, architecture),
        (_LOAD, 0, 0, _AT_NUMBER),
        (_IF_EQUAL, 0, 6, socket_call),
        (_LOAD, 0, 0, _AT_DOMAIN),
        (_IF_EQUAL, 1, 0, _AF_INET),
        (_IF_EQUAL, 0, 3, _AF_INET6),
        (_LOAD, 0, 0, _AT_TYPE),
        (_AND, 0, 0, _TYPE_MASK),
        (_IF_EQUAL, 1, 0, _SOCK_DGRAM),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    )


def _no_congestion_marks(architecture: int, _socket_call: int, setsockopt_call: int) -> tuple[_Instruction, ...]:
    """Return the filter in the kernel's classic BPF."""
    return (
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
