"""What the gateway allows a client, each bound with its reason. Bounds between peers are `swarm_protocol.limits`'."""

from __future__ import annotations

# --- a request -----------------------------------------------------------------------------------------------------

# A prompt of 128k tokens is about half a megabyte of text; JSON escapes may double it, chat parts add some.
MAX_HTTP_BODY_BYTES = 4 * 2**20
# Text beyond what fits the body cannot come; this names the field that is too long.
MAX_PROMPT_CHARS = 2 * 2**20
# Four megabytes on a slow uplink of 1 Mbit/s.
HTTP_BODY_TIMEOUT_S = 40.0
# Longer than any name that a server can announce (limits.MAX_NAME_BYTES), so that it is simply not found.
MAX_MODEL_NAME_CHARS = 256
# Conversations of a day; each message costs template work.
MAX_CHAT_MESSAGES = 1024
MAX_MESSAGE_PARTS = 64
# OpenAI takes four stops; some clients send more.
MAX_STOPS = 16
MAX_STOP_CHARS = 256
# The largest vocabularies have 256k entries.
MAX_TOP_K = 2**18

# --- an answer -----------------------------------------------------------------------------------------------------

# The longest contexts in use; the model's own context bounds it further.
MAX_NEW_TOKENS = 2**17
# OpenAI's default for completions.
DEFAULT_COMPLETION_TOKENS = 16
# A page of text; chat clients that want more say so.
DEFAULT_CHAT_TOKENS = 512
# At 2 tokens a second, 3600 tokens; beyond it something is stuck.
GENERATION_TIMEOUT_S = 1800.0
# A reader that takes nothing for this long is gone, or might as well be.
HTTP_WRITE_TIMEOUT_S = 30.0

# --- the gateway ---------------------------------------------------------------------------------------------------

# Requests that run at once: each holds a chain of streams and a cache at every server.
MAX_RUNNING_REQUESTS = 64
# Open connections, most of them idle keep-alives.
MAX_CONNECTIONS = 1024
# Between a server's death and its replacement's record: one look-up, so a client may ask again soon.
RETRY_AFTER_S = 2.0
# A trace is under 10 KiB.
MAX_KEPT_TRACES = 256
# What a shutdown waits for running answers.
SHUTDOWN_GRACE_S = 5.0
