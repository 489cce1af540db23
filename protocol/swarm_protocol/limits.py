"""Every bound on what crosses the network, each with its reason.

A bound here is a promise between peers: raising one is compatible only with peers that raised it too, so a change of
these goes with a new PROTOCOL_VERSION (see `swarm_protocol.version`). What a node allows itself (cache sizes, number of
sessions) is its configuration and not here.
"""

from __future__ import annotations

# --- messages ------------------------------------------------------------------------------------------------------

# What one message can make another peer hold. Bulk goes as a stream of messages of about 1 MiB; the largest single ones
# are the activations of a prefill chunk (1024 tokens x 16384 x fp32: 64 MiB) and what stands around them.
MAX_MESSAGE_BYTES = 64 * 2**20 + 64 * 2**10

# Calls of one peer that one node works on at once. A group of 256 whose members each have one call under way comes
# nowhere near it from any single peer; a peer that hangs every call must not fill the other's memory with handlers.
MAX_CALLS_PER_PEER = 256

# Fields of any one message, and numbers packed into them: a full group has some 2,000. Parsed they take up to 100 bytes
# of memory each, and counting them some 50 ms.
MAX_MESSAGE_VALUES = 2**16

# A handshake is three short fields; it is parsed before anything is known about the peer.
MAX_HELLO_BYTES = 512

# One line of what happened, one of what to do, and the members that were missing.
MAX_FAILURE_BYTES = 16 * 2**10
# A terminal shows about 100 columns; ten such lines are enough for any cause.
MAX_FAILURE_TEXT_CHARS = 1000
# Half of a full group; further members are left out.
MAX_FAILURE_PEERS = 128
# A peer that is refused for longer than an hour should look for another one instead.
MAX_RETRY_AFTER_S = 3600.0

# --- private networks ------------------------------------------------------------------------------------------------

# A serial and four words.
MAX_INVITATION_TERMS_BYTES = 64
# Invitations that are revoked and have not expired. An owner who revokes more than that starts a new network.
MAX_REVOKED = 1024
# Their serials, of 8 bytes each.
MAX_REVOCATIONS_BYTES = 8 * 2**10 + 64
# A hello, two certificates of some 300 bytes, and the list of revocations.
MAX_PRIVATE_GREETING_BYTES = 12 * 2**10

# --- signed envelopes ----------------------------------------------------------------------------------------------

# The largest is a signed group that holds another one, see MAX_READY_BYTES.
MAX_SIGNED_PAYLOAD_BYTES = 584 * 2**10
# Version, five length fields and three texts at their own bounds, key, times and signature come to 507 bytes.
MAX_ENVELOPE_OVERHEAD_BYTES = 512
# A run's configuration is signed for as long as the run may take.
MAX_SIGNED_LIFETIME_S = 366 * 86400.0
# Year 9999, beyond which calendars (and datetime.fromtimestamp) give up.
MAX_TIME_S = 253402300799.0

# Purposes are short words in our own source.
MAX_PURPOSE_BYTES = 32
# Network ids are typed by people and shown in logs.
MAX_NETWORK_ID_BYTES = 64
# A DHT key or "run/step/attempt": a kind, a name at MAX_NAME_BYTES, and numbers.
MAX_SUBJECT_BYTES = 255

# --- records in the DHT --------------------------------------------------------------------------------------------

# All records of a key come in one answer of at most MAX_FIND_RESPONSE_BYTES: 450 records at this bound.
MAX_RECORD_BYTES = 8 * 2**10
# So many fit an answer even if each is as large as allowed. What comes later goes to the keys below.
MAX_RECORDS_PER_KEY = 128
# How long the dead are listed, but for node records, which live up to five times as long. Records are refreshed at half
# of their life, so one lost refresh does no harm.
RECORD_LIFETIME_S = 60.0
# For records that change rarely; beyond this the dead would be counted on for too long.
MAX_RECORD_LIFETIME_S = 300.0
# Less than half of RECORD_LIFETIME_S: a record is refreshed with 30 s left, so a reader whose clock is this far ahead
# never sees a living peer as expired.
MAX_CLOCK_SKEW_S = 15.0
# A reader asks for all keys below a full one at once.
NUM_CHILD_KEYS = 8
# 4,681 keys: full, they list half a million peers.
MAX_KEY_DEPTH = 4

# The keys below four full ones.
MAX_FIND_KEYS = 32
# The peers that one answer names for a key: a whole bucket of the routing table.
MAX_FOUND_PEERS = 20
# Addresses by which one node is named to others: a few interfaces, a forwarded port, three relays.
MAX_CONTACT_ADDRS = 8
# A peer id and MAX_CONTACT_ADDRS addresses of 259 bytes.
MAX_PATH_MESSAGE_BYTES = 3 * 2**10
# MAX_FIND_KEYS digests of 34 bytes and MAX_CONTACT_ADDRS addresses of 259 bytes.
MAX_FIND_REQUEST_BYTES = 4 * 2**10
# The unary connection carries messages of up to 4 MiB, its own framing included.
MAX_FIND_RESPONSE_BYTES = 4 * 2**20 - 4 * 2**10

# --- fields of records ---------------------------------------------------------------------------------------------

# A person's name for their machine; fits a column of the dashboard.
MAX_NODE_NAME_CHARS = 64
# Hub ids are at most 96 + 1 + 96 characters and in practice under 60.
MAX_NAME_BYTES = 128
# A commit hash or sha256 in hex.
MAX_REVISION_BYTES = 64
# A hub id, 96 + 1 + 96 characters, and a commit behind an @.
MAX_SOURCE_BYTES = 256
# "1.2.3.dev4+g0123456789" and the like.
MAX_VERSION_CHARS = 32
# "NVIDIA GeForce RTX 5090 Laptop GPU x8" and the like.
MAX_DEVICE_CHARS = 64
# A host has a few interfaces with TCP and QUIC each, and a relay or two.
MAX_ADDRS = 12
# A relayed address with two peer ids and a long DNS name.
MAX_ADDR_BYTES = 256
# One node's models and runs; more needs another node, since each wants memory of its own.
MAX_MODELS_PER_NODE = 8
MAX_RUNS_PER_NODE = 8
# The links to the likeliest neighbours; a full mesh would grow with the network.
MAX_RTT_PEERS = 32

# 1 PiB, beyond any one node.
MAX_MEMORY_BYTES = 2**50
# Beyond any one node; keeps sums of claims finite and exact.
MAX_TOKENS_PER_S = 1e9
# The deepest published models have 126 blocks.
MAX_BLOCKS = 4096
# A block that takes ten minutes a token serves nobody.
MAX_BLOCK_MS = 600_000.0
# Cache room of MAX_MEMORY_BYTES at 1 KiB a token.
MAX_KV_TOKENS = 2**40
# Requests waiting at one server; far beyond what admission lets in.
MAX_QUEUE_DEPTH = 2**20
# A minute: beyond it a link is down.
MAX_RTT_MS = 60_000.0
# One outer step a second for 30,000 years.
MAX_OUTER_STEP = 2**40
# Cross-entropy starts near ln(vocabulary), about 12; a diverged run is still shown.
MAX_LOSS = 1e6
# What a parameter may move by in one interval. No training comes near; and momentum and parameters of 2^20 outer steps
# of this are still finite, so that a member that sends huge numbers is found out, and no state overflows.
MAX_PARAMETER_MOVE = 1e12
# What a member measures of a round: five phases, and room for a finer division.
MAX_PHASES = 8
MAX_PHASE_NAME_BYTES = 32
# A day: a round waits for members as long as it takes, and a number beyond this says no more than this.
MAX_MEASURED_S = 86_400.0
# 8 Tbit/s, more than any link has; it keeps the logarithms and sums of claims finite.
MAX_LINK_BYTES_PER_S = 2.0**40
# Members whose rates one member reports in a round: those of the usual largest group. More would not fit a record
# beside the longest refusals.
MAX_REPORTED_RATES = 16
# The members whose held-out scores a record tells, the lowest first, for the same reason.
MAX_REPORTED_SCORES = 16
# One member's traffic of one round; 1 PiB is beyond any link.
MAX_ROUND_BYTES = 2**50
# Refusals of one round that a record tells: with a line each they fill most of it, and seven are a pattern.
MAX_REFUSALS = 7
# Two lines of a terminal.
MAX_REFUSAL_CHARS = 180
# sha256 names all content.
DIGEST_BYTES = 32

# Connections of one node: more sockets than it can open.
MAX_CONNECTED = 2**16

# --- the control socket of a node ------------------------------------------------------------------------------------

# A status with all addresses and peers comes to 35 KiB.
MAX_CONTROL_BYTES = 64 * 2**10
# What a daemon shows of its own addresses, beyond the MAX_ADDRS that it publishes.
MAX_CONTROL_ADDRS = 32
# What a status lists of the connected peers: those with the most bytes. It counts all of them.
MAX_CONTROL_PEERS = 64
# Payload exchanged with one peer, or in a month; beyond any link.
MAX_TRAFFIC_BYTES = 2**60

# --- serving -------------------------------------------------------------------------------------------------------

# Four short texts and three numbers, at their bounds.
MAX_OPEN_BYTES = 1024
# A UUID in hex, or a client's own short name.
MAX_SESSION_ID_BYTES = 64
# The longest published contexts are a million tokens.
MAX_SESSION_TOKENS = 2**20
# 1024 x 16384 x fp32 is MAX_MESSAGE_BYTES; longer prompts go in several steps, so that others' decoding goes between.
MAX_STEP_TOKENS = 1024
# An hour: a peer that waits has long gone elsewhere.
MAX_STEP_MS = 3_600_000.0
# Positions of all sequences in a stateless call; what they take in bytes a server bounds by its own memory.
MAX_FORWARD_ROWS = 2**20
# Numbers in a row: those of a row that fills a message. Vocabularies have up to 256k, hidden states 16k.
MAX_COLUMNS = MAX_MESSAGE_BYTES // 4
# Random, so that nobody guesses another's.
SEQUENCE_ID_BYTES = 16
# Positions in a page of a server's cache. Pages are named and handed over whole, so it is the same everywhere.
PAGE_TOKENS = 16
# One for each page of the longest context.
MAX_PAGE_KEYS = 2**16
# A server's largest batch, several times over; beyond it a second message costs nothing.
MAX_FRAMES = 256
# Servers whose times a token brings along. Longer chains tell of the nearest.
MAX_UPSTREAM = 16
# How often a sequence may be told its neighbours: with each server that comes or goes, far more than a session meets.
MAX_LINK_UPDATES = 2**20
# What a frame takes beside its rows: ids of 52, 16 and 16 bytes, names of 64, some numbers, twenty likeliest tokens,
# and two times of each server before.
FRAME_BYTES = 768
# The tokens of a longest answer (4 MiB) are the largest of them. One that opens a sequence has the names of a longest
# prompt's pages (1 MiB), each token of the largest vocabularies (1 MiB) and a grammar.
MAX_FRAMES_HEADER_BYTES = 6 * 2**20
# Beyond it every token is as likely as any other.
MAX_TEMPERATURE = 100.0
# Enough to follow a draw; beyond it all logits are hardly larger.
MAX_TOP_LOGITS = 1024
# As in OpenAI's API.
MAX_LOGPROBS = 20
# As in OpenAI's API, both ways.
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
# OpenAI's API takes 300.
MAX_BIASES = 1024
# A factor on logits: 1.3 is strong already.
MAX_REPETITION_PENALTY = 100.0
# The end tokens of a model are a few, and a request may name some of its own.
MAX_END_IDS = 128
# Token ids are 32-bit numbers; four times the largest vocabularies.
MAX_VOCAB = 2**20
# A JSON schema of a hundred tools. Compiling takes about a second for so much.
MAX_GRAMMAR_BYTES = 64 * 2**10
# A token that top-k or top-p excluded has minus infinity, which is replaced by this.
MAX_LOGPROB = 1e6
# tokenizer.json of a vocabulary of 256k is 33 MB in one of the largest; all of a model's small files are one message.
MAX_MODEL_FILE_BYTES = 48 * 2**20
# The names that clients know are a dozen.
MAX_MODEL_FILES = 16
# The largest published models have some 200 files of weights.
MAX_WEIGHT_FILES = 1024
# 64 TiB, more than any model's file; an index of a chunk in it fits 32 bits.
MAX_WEIGHT_FILE_BYTES = 2**46
# The small files, the index of the weights, and room for what tokenizers to come may need.
MAX_MANIFEST_FILES = 32
# Tensors of one block lie together in a file, so a block has a range or two; 4096 blocks with three each.
MAX_MANIFEST_RANGES = 12_288
# MAX_MANIFEST_RANGES of 20 bytes, and MAX_WEIGHT_FILES of 210 bytes.
MAX_MANIFEST_BYTES = 512 * 2**10
# Chunks of one proof: 512 KiB.
MAX_DRAWN_CHUNKS = 8
# Levels of the hash tree over the chunks of MAX_WEIGHT_FILE_BYTES.
MAX_CHUNK_PATH = 30
# MAX_DRAWN_CHUNKS paths of MAX_CHUNK_PATH digests.
MAX_POSSESSION_STATEMENT_BYTES = 9 * 2**10
# The statement in its envelope, and the chunks.
MAX_POSSESSION_BYTES = 528 * 2**10
# A signed manifest, and a statement in its envelope.
MAX_WRONG_POSSESSION_BYTES = MAX_MANIFEST_BYTES + 12 * 2**10
# Servers that one node keeps evidence against: more than serve most models. Each has one statement.
MAX_SERVER_BANS = 256
# The peer ids of all of them.
MAX_SERVER_BANS_REQUEST_BYTES = 16 * 2**10

# --- training rounds -------------------------------------------------------------------------------------------------

# Each member of a butterfly talks to each other one: beyond this, a run needs clusters (see `MAX_TRAINERS`).
MAX_GROUP_MEMBERS = 256
# The members of a round and the trainers whose work they bring: a signed group takes 22 bytes at most for each of
# these, and it may hold another group, so that twice as much must fit MAX_SIGNED_PAYLOAD_BYTES.
MAX_TRAINERS = 4096
# Trainers that one round takes into the run through the others: with 54 bytes each, 27 KiB of its signed group.
MAX_NEWCOMERS = 512
# Attempts at one outer step: one a second for twelve days.
MAX_ATTEMPT = 2**20
# Tokens of one interval: 1e9 tokens/s for a day.
MAX_INTERVAL_TOKENS = 10**14
# fp32 parameters of a run: 64 GiB, beyond what a volunteer's memory holds.
MAX_PART_VALUES = 2**34
# Leaves of a run's vector: MAX_PART_VALUES in leaves of 98,304, rounded up to a power of two.
MAX_LEAVES = 2**18
# A member that has not said anything for this long while parts or votes are due is taken for dead.
MAX_PHASE_S = 3600.0
# Outer steps that a newcomer may have to prove itself: nearly three years at a step a day.
MAX_PROBATION_STEPS = 1000
# Outer steps for which a run may remember a proven member that is away.
MAX_ABSENCE_STEPS = 10_000
# Invitations, and inviters, that one message revokes: 320 bytes and 1 KiB.
MAX_RUN_REVOKED = 32
MAX_REVOKED_INVITERS = 16
MAX_RUN_REVOCATION_BYTES = 2 * 2**10
# Newcomers that one group lets in by an invitation or by vouches; others wait for the next one.
MAX_CREDENTIALS = 32
# Members that the reports of one group demote, each report an equal share, with 54 bytes each. Reports of later steps
# demote the others.
MAX_DEMOTED = 256
# Members that vouch for one newcomer.
MAX_VOUCHERS = 4
# A certificate of an invitation to a run (some 320 bytes), its link, or a vouch.
MAX_RUN_CREDENTIAL_BYTES = 640
# A run's id of MAX_NAME_BYTES, a serial, a number and a flag. In an envelope within MAX_RUN_CREDENTIAL_BYTES.
MAX_RUN_TERMS_BYTES = 160
# Contributions of one outer step whose effect on the held-out loss is measured; each costs all members a forward pass.
MAX_SCORED = 4
# In millionths of a nat: no loss of a model that is of any use moves by more in a step.
MAX_EFFECT = 100_000_000
# A signed group with the group whose outcome it resumes: 256 signed reports (80 KiB), MAX_TRAINERS (84 KiB),
# MAX_NEWCOMERS, MAX_CREDENTIALS (52 KiB), MAX_DEMOTED (14 KiB), effects (6 KiB) and a resume order, twice, and one lock
# (27 KiB): 568 KiB. In a run without clusters, credentials and orders it is 223 KiB at most.
MAX_READY_BYTES = 576 * 2**10
# What a trainer shows of itself to the head that it wants to follow: a credential of MAX_VOUCHERS vouches.
MAX_FOLLOW_BYTES = 2 * 2**10
# 256 part digests and two more.
MAX_VOTE_BYTES = 16 * 2**10
# A signed group, an outcome, and a signature of each of 256 members; ids of members beside it.
MAX_CERTIFICATE_BYTES = 640 * 2**10
# A reason and the ids of a whole group.
MAX_ABORT_BYTES = 32 * 2**10
# Digests and indices.
MAX_REQUEST_BYTES = 1024
# A proof of a part's leaves: two digests for each of the 19 levels of a tree over MAX_PART_VALUES, 98,304 to a leaf.
MAX_OPENING_BYTES = 2 * 2**10
# A leaf of 98,304 fp32 values and a proof.
MAX_AUDITED_SLICE_BYTES = 400 * 2**10
# Leaves of one part that one member may ask for in an attempt.
MAX_DRAWS = 8
# A signed group and one leaf of each of its members: 26 MiB for 256 members in int8, 60 KiB for five and 10M values.
# What is larger is refused, and convicts nobody.
MAX_EVIDENCE_BYTES = 48 * 2**20
# Two signed groups.
MAX_EQUIVOCATION_BYTES = 2 * (MAX_READY_BYTES + MAX_ENVELOPE_OVERHEAD_BYTES) + 2**10
# Evidence about a server has inputs and outputs of 500 positions of a model with 4,096 columns, as fp32; longer answers
# are not kept.
MAX_SERVED_EVIDENCE_BYTES = 16 * 2**20
MAX_SHOWN_DRAWS = 4096
# Leaves of one member's slice that its validator shows.
MAX_SHOWN_LEAVES = 16
# The evidence, and the run's file, which has at most 64 KiB.
MAX_EVIDENCE_FILE_BYTES = MAX_EVIDENCE_BYTES + 65 * 2**10
# Members of a run that are banned at one time: more peers than four full groups.
MAX_BANS = 1024
# The peer ids of all of them.
MAX_EVIDENCE_REQUEST_BYTES = 64 * 2**10
# Certificates are shown to every newcomer, also long after the run has ended.
CERTIFICATE_LIFETIME_S = 360 * 86400.0
