"""Starts `swarm-node` processes on hosts of the lab, and sends commands to those that are talkers."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from internet import namespaces, talker
from internet.lab import PORT, Lab, address6
from support.forked_node import Begin
from support.node_process import Node

NETWORK = ("--network-id", "lab")
JOIN = ("join", *NETWORK, "--probe", "off", "--device", "cpu", "--threads", "1")
LISTEN = ("--listen", "/ip4/0.0.0.0/tcp/{port}")
LISTEN_BOTH = (*LISTEN, "--listen", "/ip6/::/tcp/{port}")
START_S = 60.0


class Conversation:
    """Send a command to a talker, and receive its messages until the result."""

    def __init__(self, path: Path, command: dict[str, object]) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(path))
        self._lines = self._socket.makefile()
        self._socket.sendall(json.dumps(command).encode() + b"\n")

    def next(self, *, within_s: float = START_S) -> dict[str, Any]:
        """Return the next message. The result is under `done`. Fails with the talker's error, or if it sends nothing in
        time."""
        self._socket.settimeout(within_s)
        try:
            line = self._lines.readline()
        except TimeoutError:
            raise AssertionError(f"a talker said nothing for {within_s:g} s") from None
        assert line, "a talker has ended"
        said: dict[str, Any] = json.loads(line)
        assert "error" not in said, said["error"]
        return said

    def result(self, *, within_s: float = START_S) -> Any:
        until = time.monotonic() + within_s
        while "done" not in (said := self.next(within_s=max(0.01, until - time.monotonic()))):
            pass
        self.close()
        return said["done"]

    def end(self, *, within_s: float = START_S) -> Any:
        """Ask the talker to end early, and return the result."""
        self._socket.shutdown(socket.SHUT_WR)
        return self.result(within_s=within_s)

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


class LabNode(Node):
    """A node on a host of the lab."""

    peer_id: str
    public: tuple[str, ...]
    """The addresses at which other hosts reach the node, if it is on a public host."""
    public6: tuple[str, ...]

    def __init__(self, *arguments: object, host: str, port: int, home: Path, begin: Begin) -> None:
        super().__init__(*arguments, home=home, is_forked=True, begin=begin)
        self.host, self.port = host, port
        self._conversations: list[Conversation] = []

    def tell(self, command: str, **arguments: object) -> Conversation:
        """Send a talker a command, and return the conversation."""
        conversation = Conversation(self.home / talker.SOCKET, {"command": command, **arguments})
        self._conversations.append(conversation)
        return conversation

    def end(self) -> None:
        for conversation in self._conversations:
            conversation.close()
        super().end()


class LabNodes:
    """The nodes of one test. Their homes and logs are below `folder`."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self._folder = folder
        self._nodes: list[LabNode] = []

    def seed(self, host: str = "seed", *, peers: Sequence[str] = (), listen: Sequence[str] = LISTEN) -> LabNode:
        node = self.start(host, "seed", *NETWORK, peers=peers, listen=listen)
        return self.wait_ready(node)

    def talkers(
        self,
        *hosts: str,
        peers: Sequence[str],
        options: Sequence[str] = (),
        home: str = "",
        listen: Sequence[str] = LISTEN,
    ) -> list[LabNode]:
        """Start a talker on each of `hosts`, at the same time."""
        stand_by = (*JOIN, "--take", "nothing", *options)
        nodes = [
            self.start(host, *stand_by, peers=peers, home=home, listen=listen, begin_with=talker.begin)
            for host in hosts
        ]
        for node in nodes:
            self.wait_ready(node)
            while node.wait_for("step", START_S)["title"] != "standing by":
                pass
        return nodes

    def start(
        self,
        host: str,
        *arguments: object,
        peers: Sequence[str] = (),
        port: int = PORT,
        home: str = "",
        listen: Sequence[str] = LISTEN,
        begin_with: Any = namespaces.enter,
    ) -> LabNode:
        """Start a node that listens on `port`, or on the default addresses if `listen` is empty. `home` names the home
        of an earlier node to use again."""
        node = LabNode(
            *arguments,
            *(each.format(port=port) for each in listen),
            *(("--peers", *peers) if peers else ()),
            home=self._folder / (home or f"{host}-{len(self._nodes)}"),
            host=host,
            port=port,
            begin=partial(begin_with, self.lab.namespace(host)),
        )
        self._nodes.append(node)
        return node

    def wait_ready(self, node: LabNode) -> LabNode:
        ready = node.wait_for("ready", START_S)
        node.peer_id = str(ready["peer_id"])
        node.public = (f"/ip4/{self.lab.address(node.host)}/tcp/{node.port}/p2p/{node.peer_id}",)
        node.public6 = (f"/ip6/{address6(node.host)}/tcp/{node.port}/p2p/{node.peer_id}",)
        return node

    def end(self) -> None:
        for node in self._nodes:
            node.end()


@contextmanager
def lab_nodes(lab: Lab, folder: Path) -> Iterator[LabNodes]:
    """Yield nodes that end with the context. No process may be left in the lab."""
    nodes = LabNodes(lab, folder)
    try:
        yield nodes
    finally:
        nodes.end()
    until = time.monotonic() + 10
    while left := lab.processes():
        assert time.monotonic() < until, f"processes were left in the lab: {left}"
        time.sleep(0.05)
