"""Starts child processes that can open no UDP socket (Linux), so that the libp2p daemon cannot speak QUIC.

go-libp2p always has QUIC on, and dials QUIC addresses that peers tell it by identify, whatever addresses we name. Its
QUIC library (quic-go 0.40.0) has known faults that such a peer could use. No flag of the daemon turns it off. A seccomp
filter does: `socket` fails with EACCES for datagrams of IPv4 and IPv6, and the daemon goes on with TCP. The filter is
set in a thread of its own, from which the child inherits it; the thread ends, and this process stays as it was.
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
from typing import TypeVar

T = TypeVar("T")

_ARCHITECTURES = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
"""By machine: what the kernel calls it, and the number of the system call `socket`."""

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _AND, _IF_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EACCES
_AT_NUMBER, _AT_ARCHITECTURE, _AT_DOMAIN, _AT_TYPE = 0, 4, 16, 24
_AF_INET, _AF_INET6, _SOCK_DGRAM, _TYPE_MASK = 2, 10, 2, 0xF

logger = logging.getLogger(__name__)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def without_datagrams(start: Callable[[], T]) -> T:
    """Call `start` in a thread whose child processes can open no UDP socket; where that is not possible, as it is."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            if sys.platform == "linux":
                _forbid_datagrams()
            outcome.append(start())
        except BaseException as error:  # raised again in the thread that waits
            failure.append(error)

    thread = threading.Thread(target=run, name="start without UDP")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def _forbid_datagrams() -> None:
    """Forbid them to this thread and its children; there is no way back."""
    known = _ARCHITECTURES.get(platform.machine())
    if known is None:
        logger.debug("no filter of datagrams for %s", platform.machine())
        return
    instructions = _filter(*known)
    program = _Program(len(instructions) // 8, instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    is_set = libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    if not is_set or libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        logger.warning(
            "this system does not let a process give up UDP (errno %d), so peers can have the libp2p daemon speak QUIC",
            ctypes.get_errno(),
        )


def _filter(architecture: int, socket_call: int) -> bytes:
    """Return the filter in the kernel's classic BPF; a jump counts the instructions to leave out."""
    program = (
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
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
