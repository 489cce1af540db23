"""Limits of a request and an answer, each with its reason.

Limits between peers are in `swarm_protocol.limits`, limits on connections in `swarm_node.http.server`.
"""

from __future__ import annotations

# A prompt of 128k tokens is about half a megabyte of text. JSON escapes may double it, and chat parts add some.
MAX_HTTP_BODY_BYTES = 4 * 2**20
# Objects, lists and strings of a body: a thousand messages with a part and a call each have 30,000, and 128 tools of a
# hundred fields 90,000. Each takes a microsecond or two of the event loop, and up to 200 bytes while the request runs.
MAX_HTTP_VALUES = 2**17
# Bytes on their way of all callers' bodies: as many as 64 at their limit. Small bodies are not refused, so that a few
# callers with large ones do not keep others out.
MAX_ARRIVING_BYTES = 256 * 2**20
# The same for one address: sixteen bodies at their limit, so that one address alone does not keep others out.
MAX_ADDRESS_ARRIVING_BYTES = 64 * 2**20
SMALL_HTTP_BODY_BYTES = 64 * 2**10
# Half of what fits the body, so that the error names the field that is too long.
MAX_PROMPT_CHARS = 2 * 2**20
# Four megabytes on a slow uplink of 1 Mbit/s.
HTTP_BODY_TIMEOUT_S = 40.0
# Longer than any name that a server can announce (limits.MAX_NAME_BYTES): a longer valid name is simply not found.
MAX_MODEL_NAME_CHARS = 256
# A conversation of a day; each message costs template work.
MAX_CHAT_MESSAGES = 1024
MAX_MESSAGE_PARTS = 64
# As many messages of the assistant, each with a call, its result and thoughts.
MAX_RESPONSES_ITEMS = 4 * MAX_CHAT_MESSAGES
# Tools of a request, as OpenAI limits them. The model's prompt includes each.
MAX_TOOLS = 128
MAX_TOOL_CALLS = 128
# Chat templates use a few variables.
MAX_TEMPLATE_KWARGS = 32
# Each prompt of a request is answered `n` times, and each answer holds a chain of its own.
MAX_CHOICES = 16
# As in OpenAI's interface.
MAX_COMPLETION_LOGPROBS = 5
MAX_CHAT_LOGPROBS = 20
# As in OpenAI's interface.
MAX_METADATA = 16
# The name of a caller, a cache or a schema.
MAX_LABEL_CHARS = 1024
# Inputs of one embedding request, as OpenAI limits them: clients send up to so many at once by default.
MAX_EMBEDDING_INPUTS = 2048
# Inputs that count as one running answer: their vectors, as numbers in JSON, take some 20 MB at a hidden size of 4,096.
INPUTS_PER_ANSWER = 256
# The largest vocabularies have 256k entries.
MAX_TOP_K = 2**18

# Token ids in a list: the longest contexts in use.
MAX_TOKEN_IDS = 2**17
# Above any context: the model's own context limits an answer, and only the error about that can name the limit.
MAX_NEW_TOKENS = 2**31
# Taken from the rate before an answer without a limit begins; tokens beyond that are taken as they come.
RESERVED_TOKENS = 512
# OpenAI's default for completions.
DEFAULT_COMPLETION_TOKENS = 16
# 3,600 tokens at 2 tokens a second. A request that runs longer is stuck.
GENERATION_TIMEOUT_S = 1800.0
# A longer tool call is treated as text: arguments of a page or two are usual.
MAX_TOOL_CALL_CHARS = 2**16
# Tokens of several choices that wait for the reader.
MAX_QUEUED_TOKENS = 64
# JSON has no infinity: OpenAI's value for a token that was impossible.
LEAST_LOGPROB = -9999.0

# Choices of a model that run at once; two and a half times as many of all models. Each holds a chain of streams, and a
# cache at every server.
MAX_RUNNING_REQUESTS = 64
# Names in a message about an unknown model.
MAX_NAMED_MODELS = 20
# Models whose first appearance is kept.
MAX_SEEN_MODELS = 4096
# A lost server's replacement is found with one look-up, so a client may ask again soon.
RETRY_AFTER_S = 2.0
# Each trace is under 10 KiB.
MAX_KEPT_TRACES = 256

# Default rate of each address if other machines can reach the gateway and it has no keys.
REQUESTS_PER_MIN = 600
# A given key is compared with all of them.
MAX_KEYS = 1024
MAX_KEY_FILE_BYTES = 2**20
# 96 bits in base64, which nobody guesses.
MIN_KEY_CHARS = 16
MAX_KEY_CHARS = 256
# How often the key file is checked for changes.
KEYS_FRESH_S = 1.0
