"""What nodes send each other does not change without a decision about the protocol's version."""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

from support.site_pages import DOCS
from swarm_protocol import limits, proto
from swarm_protocol.version import PROTOCOL_VERSION

DIGEST = (7, "28a4ca2ccded4f6f")
"""The protocol's version, and the digest of its messages, methods and limits."""

CHANGED = """a message, a method or a limit was changed. Nodes of the last release lack the change and will run beside
this one. If they cannot work with it, raise PROTOCOL_VERSION, unless it was raised since that release. Then record the
new digest in DIGEST."""

ON_THIS_MACHINE = {"control_pb2", "p2pd_pb2"}
"""Messages that do not cross the network."""


def test_messages_methods_and_limits_are_those_of_the_protocols_version() -> None:
    content = "\n".join([*_messages(), *_methods(), *_limits()])
    assert (PROTOCOL_VERSION, hashlib.sha256(content.encode()).hexdigest()[:16]) == DIGEST, CHANGED


def _messages() -> Iterator[str]:
    for module in sorted(each.name for each in pkgutil.iter_modules(proto.__path__)):
        if module not in ON_THIS_MACHINE:
            file: Any = importlib.import_module(f"{proto.__name__}.{module}").DESCRIPTOR
            for _, message in sorted(file.message_types_by_name.items()):
                yield from _fields(message)


def _fields(message: Any) -> Iterator[str]:
    for field in message.fields:
        inner = field.message_type.full_name if field.message_type is not None else ""
        kind = f"{field.type} {inner} {field.is_repeated} {field.has_presence}"
        yield f"{message.full_name}.{field.name} {field.number} {kind}"
    for inner in message.nested_types:
        yield from _fields(inner)


def _methods() -> list[str]:
    """The methods and protocol ids of the pages, on which `tests/docs/test_protocol_pages.py` finds all of the code."""
    pages = "".join((DOCS / "reference/protocol" / f"{name}.md").read_text("utf-8") for name in ("transport", "paths"))
    return sorted(re.findall(r"^\| (`/.*?`|`paths/.*?`|`.*?` \| call|`.*?` \| stream) ", pages, flags=re.MULTILINE))


def _limits() -> Iterator[str]:
    return (f"{name} {value}" for name, value in sorted(vars(limits).items()) if name.isupper())
