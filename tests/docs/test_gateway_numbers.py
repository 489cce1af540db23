"""The bounds in the gateway's reference equal those in the code."""

from __future__ import annotations

from support.site_pages import written
from swarm.serving.peer_shares import KEPT_AFTER_S
from swarm.serving.sampling.sampling import MAX_STOP_CHARS, MAX_STOPS
from swarm.serving.session.client_state import SessionOptions
from swarm.serving.session.session_messages import GROWTH_TOKENS
from swarm_node.gateway import http_limits
from swarm_protocol.limits import PAGE_TOKENS

PAGE = " ".join(written("reference")["reference/gateway.md"].split())
MIB = 2**20
RUNNING = http_limits.MAX_RUNNING_REQUESTS

SAID = [
    f"`stop` is one string or up to {MAX_STOPS}, of {MAX_STOP_CHARS} characters at most",
    f"at most {http_limits.MAX_HTTP_BODY_BYTES // MIB} MiB and {http_limits.MAX_HTTP_VALUES:,} objects",
    f"arrives within {http_limits.HTTP_BODY_TIMEOUT_S:.0f} s",
    f"up to {http_limits.MAX_CHAT_MESSAGES:,} messages and {http_limits.MAX_TOOLS} tools",
    f"over {http_limits.SMALL_HTTP_BODY_BYTES // 1024} KiB get status 429",
    f"arriving fill {http_limits.MAX_ARRIVING_BYTES // MIB} MiB, or those of their own address "
    f"{http_limits.MAX_ADDRESS_ARRIVING_BYTES // MIB} MiB",
    f"a completion has at most {http_limits.DEFAULT_COMPLETION_TOKENS} tokens",
    f"room for its prompt and {GROWTH_TOKENS} tokens of the answer",
    f"by {PAGE_TOKENS} tokens at a time",
    f"{GROWTH_TOKENS} more tokens, the answer waits for up to {SessionOptions().patience_s:.0f} s",
    f"After {KEPT_AFTER_S:.0f} s, up to half of a server's cache is kept",
    f"fill the {SessionOptions().max_replay_bytes // 2**30} GiB in which",
    f"counts {http_limits.RESERVED_TOKENS} tokens in advance",
    f"Up to {http_limits.MAX_EMBEDDING_INPUTS:,} inputs",
    f"each {http_limits.INPUTS_PER_ANSWER} of them count as one of the answers that run at once",
    f"At most {RUNNING} answers of a model run at once, and {RUNNING // 4} more of callers with at most four",
    f"half of the {2 * RUNNING}, and half of the {RUNNING // 2} for callers with few",
]


def test_gateway_reference_has_the_bounds_of_the_code() -> None:
    assert [words for words in SAID if words not in PAGE] == []
