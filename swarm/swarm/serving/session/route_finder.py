"""Which servers could take blocks that nobody runs: routing over what a client knows, looked up again when that fails.

Leaves the choice of a chain to `router`, and what to do with it to `course`. Used by the tasks of one session.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from swarm.router.routing import NoChain, Outlook
from swarm.serving.session.hop import Neighbours
from swarm.serving.session.known_servers import RETRY_S, Candidate, KnownServers
from swarm.serving.session.peer_health import Links


class Finder:
    """Of one session with room for `max_tokens`."""

    def __init__(
        self,
        known: KnownServers,
        links: Links,
        *,
        max_tokens: int,
        salt: str,
        patience_s: float,
    ) -> None:
        self._known = known
        self._links = links
        self._max_tokens = max_tokens
        self._salt = salt
        self._patience_s = patience_s
        self._began_s: float | None = None

    @property
    def model(self) -> str:
        return self._known.model

    async def find(self, start: int, end: int, beside: Neighbours, *, since_s: float | None) -> list[Candidate]:
        """The cheapest chain over `[start, end)` beside these servers.

        Looked for until `patience_s` after `since_s`, or twice if that is None. Until then servers to avoid are asked
        again where there are no others; without `since_s`, until `patience_s` after the session's first search. Raises
        NoChain.
        """
        clock = asyncio.get_running_loop().time
        self._began_s = clock() if self._began_s is None else self._began_s
        give_up_at_s = 0.0 if since_s is None else since_s + self._patience_s
        insist_until_s = self._began_s + self._patience_s if since_s is None else give_up_at_s
        looked_up = False
        while True:
            outlook = self._outlook(beside)
            if clock() >= insist_until_s:
                outlook = replace(outlook, barred=outlook.avoid)
            try:
                return self._known.find_chain(start, end, outlook)
            except NoChain:
                # what was known at the start of the session may be old
                if looked_up and clock() >= give_up_at_s:
                    raise
                await asyncio.sleep(RETRY_S if looked_up else 0)
                await self._known.look_up()
                looked_up = True

    def _outlook(self, beside: Neighbours) -> Outlook:
        return self._links.outlook(
            self._known.servers,
            self._max_tokens,
            self._salt,
            previous_peer_id=beside.previous_peer_id,
            next_peer_id=beside.next_peer_id,
        )
