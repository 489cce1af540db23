"""Every bound on what crosses the network, each with its reason.

A bound here is a promise between peers. A node that raises one is compatible only with peers that raised it too, so the
release after a change of a bound has a new PROTOCOL_VERSION (see `swarm_protocol.version`). The limits that a node sets
for itself (cache sizes, number of sessions) belong to its configuration.
"""

from __future__ import annotations

# --- messages ------------------------------------------------------------------------------------------------------

# One message makes its receiver hold this much memory. Bulk data goes as a stream of messages of about 1 MiB. The
# largest single messages are the activations of a prefill chunk (1024 tokens x 16384 x fp32: 64 MiB) with their header.
MAX_MESSAGE_BYTES = 64 * 2**20 + 64 * 2**10

# One node works on this many calls of one peer at once. A member of a group of 256 has far fewer calls under way with
# any one peer. A peer whose calls all hang must not fill the other's memory with handlers.
MAX_CALLS_PER_PEER = 256

# This bounds the fields of one message and the numbers packed into them together; a full group has some 2,000. Once
# parsed, each takes up to 100 bytes of memory. Counting this many takes some 50 ms.
MAX_MESSAGE_VALUES = 2**16

# A hello has three short fields, and is parsed before anything is known about the peer.
MAX_HELLO_BYTES = 512

# A failure has a message, a remedy, and the members that were missing.
MAX_FAILURE_BYTES = 16 * 2**10
# A terminal shows about 100 columns; ten such lines are enough for any cause.
MAX_FAILURE_TEXT_CHARS = 1000
# This is half of a full group. A failure leaves out further members.
MAX_FAILURE_PEERS = 128
# A peer that is refused for longer than an hour should look for another one instead.
MAX_RETRY_AFTER_S = 3600.0

# --- private networks ------------------------------------------------------------------------------------------------

# The terms are a serial and up to four words.
MAX_INVITATION_TERMS_BYTES = 64
# A list has the revoked invitations that have not expired. An owner who must revoke more starts a new network.
MAX_REVOKED = 1024
# Each serial has 8 bytes.
MAX_REVOCATIONS_BYTES = 8 * 2**10 + 64
# A greeting has a hello, two certificates of some 300 bytes, and the list of revocations.
MAX_PRIVATE_GREETING_BYTES = 12 * 2**10

# --- signed envelopes ----------------------------------------------------------------------------------------------

# The largest payload is a signed group that holds another one (see MAX_READY_BYTES).
MAX_SIGNED_PAYLOAD_BYTES = 584 * 2**10
# Version, five length fields and three texts at their own bounds, key, times and signature come to 507 bytes.
MAX_ENVELOPE_OVERHEAD_BYTES = 512
# A run's configuration is signed for as long as the run may take.
MAX_SIGNED_LIFETIME_S = 366 * 86400.0
# This is the end of the year 9999, beyond which calendars (and datetime.fromtimestamp) fail.
MAX_TIME_S = 253402300799.0

# Purposes are short words in the program's own source.
MAX_PURPOSE_BYTES = 32
# Network ids are typed by people and shown in logs.
MAX_NETWORK_ID_BYTES = 64
# A subject is a DHT key or "run/step/attempt": a kind, a name of MAX_NAME_BYTES, and numbers.
MAX_SUBJECT_BYTES = 255

# --- records in the DHT --------------------------------------------------------------------------------------------

# All records of a key come in one answer of at most MAX_FIND_RESPONSE_BYTES: 450 records at this bound.
MAX_RECORD_BYTES = 8 * 2**10
# This many fit an answer even if each is as large as allowed. Later records go under the child keys.
MAX_RECORDS_PER_KEY = 128
# A dead peer stays listed for at most this time. Node records alone may live up to five times as long. A record is
# refreshed at half of its lifetime.
RECORD_LIFETIME_S = 60.0
# This is for records that change rarely. With longer lifetimes, peers would rely on dead nodes for too long.
MAX_RECORD_LIFETIME_S = 300.0
# This is less than half of RECORD_LIFETIME_S. A record is refreshed with 30 s left, so a reader whose clock is this far
# ahead never sees a live peer's record as expired.
MAX_CLOCK_SKEW_S = 15.0
# A reader asks for all child keys of a full key at once.
NUM_CHILD_KEYS = 8
# That makes 4,681 keys. If all are full, they list nearly 600,000 peers.
MAX_KEY_DEPTH = 4

# These are the child keys of four full keys.
MAX_FIND_KEYS = 32
# One answer names at most this many peers for a key: a whole bucket of the routing table.
MAX_FOUND_PEERS = 20
# One node is named to others by at most this many addresses: a few interfaces, a forwarded port, three relays.
MAX_CONTACT_ADDRS = 8
# Such a message has a peer id and MAX_CONTACT_ADDRS addresses of 259 bytes.
MAX_PATH_MESSAGE_BYTES = 3 * 2**10
# A request has MAX_FIND_KEYS digests of 34 bytes and MAX_CONTACT_ADDRS addresses of 259 bytes.
MAX_FIND_REQUEST_BYTES = 4 * 2**10
# The records of three full keys fit, each as large as allowed. The asker asks again for the rest.
MAX_FIND_RESPONSE_BYTES = 4 * 2**20 - 4 * 2**10

# --- fields of records ---------------------------------------------------------------------------------------------

# A person names their machine; the name fits a column of the dashboard.
MAX_NODE_NAME_CHARS = 64
# Hub ids are at most 96 + 1 + 96 characters and in practice under 60.
MAX_NAME_BYTES = 128
# A revision is a commit hash or a SHA-256 digest in hex.
MAX_REVISION_BYTES = 64
# A source is a hub id of 96 + 1 + 96 characters, then @ and a commit.
MAX_SOURCE_BYTES = 256
# A version looks like "1.2.3.dev4+g0123456789".
MAX_VERSION_CHARS = 32
# A device looks like "NVIDIA GeForce RTX 5090 Laptop GPU x8".
MAX_DEVICE_CHARS = 64
# A host has a few interfaces with TCP and QUIC each, and a relay or two.
MAX_ADDRS = 12
# The longest is a relayed address with two peer ids and a long DNS name.
MAX_ADDR_BYTES = 256
# Each model or run of a node needs memory of its own. More of them need another node.
MAX_MODELS_PER_NODE = 8
MAX_RUNS_PER_NODE = 8
# A record has the round trips to the likeliest neighbours. Those to all peers would grow with the network.
MAX_RTT_PEERS = 32

# 1 PiB is beyond any one node.
MAX_MEMORY_BYTES = 2**50
# No node comes near it. The bound keeps sums of claims finite and exact.
MAX_TOKENS_PER_S = 1e9
# The deepest published models have 126 blocks.
MAX_BLOCKS = 4096
# A block that takes ten minutes a token is of no use.
MAX_BLOCK_MS = 600_000.0
# A cache of MAX_MEMORY_BYTES has this room at 1 KiB a token.
MAX_KV_TOKENS = 2**40
# This many requests at one server are far more than admission lets wait.
MAX_QUEUE_DEPTH = 2**20
# This is a minute. A link that takes longer is down.
MAX_RTT_MS = 60_000.0
# At one outer step a second, this takes 30,000 years.
MAX_OUTER_STEP = 2**40
# Cross-entropy starts near ln(vocabulary), about 12. The bound still admits the loss of a diverged run.
MAX_LOSS = 1e6
# A parameter may move by this much in one interval. No training comes near it. After 2^20 outer steps of this size,
# momentum and parameters are still finite, so a member that sends huge numbers is detected before a state overflows.
MAX_PARAMETER_MOVE = 1e12
# A member measures five phases of a round. The bound leaves room for a finer division.
MAX_PHASES = 8
MAX_PHASE_NAME_BYTES = 32
# This is a day. A round waits for members without limit, and a longer time than this tells nothing more.
MAX_MEASURED_S = 86_400.0
# 8 Tbit/s is more than any link has. The bound keeps the logarithms and sums of claims finite.
MAX_LINK_BYTES_PER_S = 2.0**40
# One member reports the rates of at most this many members in a round: those of the usual largest group. More would not
# fit a record beside the longest refusals.
MAX_REPORTED_RATES = 16
# A record has the held-out scores of at most this many members, the lowest first, for the same reason.
MAX_REPORTED_SCORES = 16
# This bounds one member's traffic in one round; 1 PiB is beyond any link.
MAX_ROUND_BYTES = 2**50
# A record has at most this many refusals of one round, one line each. They fill most of the record, and seven are
# enough to show a pattern.
MAX_REFUSALS = 7
# This is two lines of a terminal.
MAX_REFUSAL_CHARS = 180
# All digests are SHA-256.
DIGEST_BYTES = 32

# One node cannot open this many sockets.
MAX_CONNECTED = 2**16

# --- the control socket of a node ------------------------------------------------------------------------------------

# A status with all addresses and peers takes 35 KiB.
MAX_CONTROL_BYTES = 64 * 2**10
# A daemon shows at most this many of its own addresses. It publishes only MAX_ADDRS of them.
MAX_CONTROL_ADDRS = 32
# A status lists the connected peers with the most bytes, and counts all of them.
MAX_CONTROL_PEERS = 64
# This bounds the payload exchanged with one peer, or in a month. No link carries as much.
MAX_TRAFFIC_BYTES = 2**60

# --- serving -------------------------------------------------------------------------------------------------------

# The message has four short texts and three numbers, each at its bound.
MAX_OPEN_BYTES = 1024
# An id is a UUID in hex, or a short name that the client chose.
MAX_SESSION_ID_BYTES = 64
# The longest published contexts are a million tokens.
MAX_SESSION_TOKENS = 2**20
# 1024 x 16384 x fp32 just fits MAX_MESSAGE_BYTES. Longer prompts take several steps, so that other sessions decode in
# between.
MAX_STEP_TOKENS = 1024
# This is an hour. A peer has stopped waiting long before.
MAX_STEP_MS = 3_600_000.0
# A stateless call has at most this many positions in all its sequences. A server bounds their bytes by its own memory.
MAX_FORWARD_ROWS = 2**20
# A row of this many numbers fills a message. Vocabularies have up to 256k entries, hidden states 16k.
MAX_COLUMNS = MAX_MESSAGE_BYTES // 4
# Ids are random, so that no client can guess another client's id.
SEQUENCE_ID_BYTES = 16
# A page of a server's cache has this many positions. Servers name and hand over whole pages, so all use the same size.
PAGE_TOKENS = 16
# There is one key for each page of the longest context.
MAX_PAGE_KEYS = 2**16
# This is several times a server's largest batch. For more frames, a second message costs nothing extra.
MAX_FRAMES = 256
# A token carries the times of at most this many servers. In longer chains it carries those of the nearest ones.
MAX_UPSTREAM = 16
# A step has at most this many drafts beside the token that they follow. Sixteen rows still cost a pass little more than
# one where reading the weights or the network takes the time.
MAX_DRAFTS = 15
# Drafts are looked for among this many tokens: what an answer repeats mostly stands in the last pages before it.
MAX_DRAFT_TEXT_TOKENS = 2**15
# A sequence learns of its neighbours with each server that joins or leaves the chain. No session meets as many changes.
MAX_LINK_UPDATES = 2**20
# A frame takes this much besides its rows: ids of 52, 16 and 16 bytes, names of 64 bytes, some numbers, the twenty
# likeliest tokens, and two times of each earlier server.
FRAME_BYTES = 768
# The largest header has the tokens of a longest answer (4 MiB). A header that opens a sequence has the names of the
# pages of a longest prompt (1 MiB), each token of the largest vocabularies (1 MiB) and a grammar.
MAX_FRAMES_HEADER_BYTES = 6 * 2**20
# At higher temperatures every token is as likely as any other.
MAX_TEMPERATURE = 100.0
# This is enough to check a draw.
MAX_TOP_LOGITS = 1024
# OpenAI's API has the same bound.
MAX_LOGPROBS = 20
# OpenAI's API has the same bounds, in both directions.
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
# OpenAI's API takes 300.
MAX_BIASES = 1024
# The penalty is a factor on logits; 1.3 is already strong.
MAX_REPETITION_PENALTY = 100.0
# A model has a few end tokens, and a request may name some more.
MAX_END_IDS = 128
# This is four times the largest vocabularies. Token ids are 32-bit numbers.
MAX_VOCAB = 2**20
# This holds a JSON schema of a hundred tools, which takes about a second to compile.
MAX_GRAMMAR_BYTES = 64 * 2**10
# A token that top-k or top-p excluded has the log-probability minus infinity, which is sent as minus this.
MAX_LOGPROB = 1e6
# One of the largest tokenizer.json files, for a vocabulary of 256k, has 33 MB. All small files of a model travel in one
# message.
MAX_MODEL_FILE_BYTES = 48 * 2**20
# Clients know a dozen names of files.
MAX_MODEL_FILES = 16
# The largest published models have some 200 files of weights.
MAX_WEIGHT_FILES = 1024
# 64 TiB is more than any model's file has. The index of a chunk in such a file fits 32 bits.
MAX_WEIGHT_FILE_BYTES = 2**46
# These are the small files, the index of the weights, and room for the files of future tokenizers.
MAX_MANIFEST_FILES = 32
# This is three ranges for each of 4096 blocks. The tensors of a block lie together in a file, so a block has a range or
# two.
MAX_MANIFEST_RANGES = 12_288
# A manifest has MAX_MANIFEST_RANGES of 20 bytes and MAX_WEIGHT_FILES of 210 bytes.
MAX_MANIFEST_BYTES = 512 * 2**10
# The chunks of one proof have 512 KiB.
MAX_DRAWN_CHUNKS = 8
# The hash tree over the chunks of MAX_WEIGHT_FILE_BYTES has this many levels.
MAX_CHUNK_PATH = 30
# A statement has MAX_DRAWN_CHUNKS paths of MAX_CHUNK_PATH digests.
MAX_POSSESSION_STATEMENT_BYTES = 9 * 2**10
# A proof has the statement in its envelope, and the chunks.
MAX_POSSESSION_BYTES = 528 * 2**10
# Evidence has a signed manifest, and a statement in its envelope.
MAX_WRONG_POSSESSION_BYTES = MAX_MANIFEST_BYTES + 12 * 2**10
# One node keeps evidence against at most this many servers, with one statement of each. Most models have fewer servers.
MAX_SERVER_BANS = 256
# A request names the peer ids of all of them.
MAX_SERVER_BANS_REQUEST_BYTES = 16 * 2**10

# --- training rounds -------------------------------------------------------------------------------------------------

# Each member of a butterfly talks to every other one. A larger run needs clusters (see `MAX_TRAINERS`).
MAX_GROUP_MEMBERS = 256
# This counts the members of a round and the trainers whose work they bring. A signed group takes at most 22 bytes for
# each trainer. It may hold another group, so twice as much must fit MAX_SIGNED_PAYLOAD_BYTES.
MAX_TRAINERS = 4096
# One round takes at most this many trainers into the run through the others. At 54 bytes each, they take 27 KiB of its
# signed group.
MAX_NEWCOMERS = 512
# At one attempt a second, an outer step reaches this after twelve days.
MAX_ATTEMPT = 2**20
# An interval reaches this with 1e9 tokens/s for a day.
MAX_INTERVAL_TOKENS = 10**14
# As fp32, this many parameters take 64 GiB, more than a volunteer's memory holds.
MAX_PART_VALUES = 2**34
# This is MAX_PART_VALUES in leaves of 98,304 values, rounded up to a power of two.
MAX_LEAVES = 2**18
# A member that has sent nothing for this long while parts or votes are due is taken for dead.
MAX_PHASE_S = 3600.0
# A newcomer may be on probation for this many outer steps: nearly three years at a step a day.
MAX_PROBATION_STEPS = 1000
# A run may remember a proven member that is away for this many outer steps.
MAX_ABSENCE_STEPS = 10_000
# One message revokes at most this many invitations (320 bytes) and inviters (1 KiB).
MAX_RUN_REVOKED = 32
MAX_REVOKED_INVITERS = 16
MAX_RUN_REVOCATION_BYTES = 2 * 2**10
# One group lets in at most this many newcomers by invitations or vouches. Others wait for the next group.
MAX_CREDENTIALS = 32
# The reports of one group demote at most this many members, each report an equal share, with 54 bytes each. Reports of
# later steps demote the others.
MAX_DEMOTED = 256
# At most this many members vouch for one newcomer.
MAX_VOUCHERS = 4
# A credential is a certificate of an invitation to a run (some 320 bytes), its link, or a vouch.
MAX_RUN_CREDENTIAL_BYTES = 640
# The terms have a run's id of MAX_NAME_BYTES, a serial, a number and a flag. Their envelope fits
# MAX_RUN_CREDENTIAL_BYTES.
MAX_RUN_TERMS_BYTES = 160
# The effect on the held-out loss is measured for this many contributions of an outer step. Each costs all members a
# forward pass.
MAX_SCORED = 4
# The unit is a millionth of a nat. The loss of a useful model does not move by more in a step.
MAX_EFFECT = 100_000_000
# The largest message is a signed group with the group whose outcome it resumes. Each of the two has 256 signed reports
# (80 KiB), MAX_TRAINERS (84 KiB), MAX_NEWCOMERS, MAX_CREDENTIALS (52 KiB), MAX_DEMOTED (14 KiB), effects (6 KiB) and a
# resume order. With one lock (27 KiB) that makes 568 KiB. In a run without clusters, credentials and orders it is
# 223 KiB at most.
MAX_READY_BYTES = 576 * 2**10
# A trainer shows a credential of up to MAX_VOUCHERS vouches to the head that it wants to follow.
MAX_FOLLOW_BYTES = 2 * 2**10
# A vote has 256 part digests and two other digests.
MAX_VOTE_BYTES = 16 * 2**10
# A certificate has a signed group, an outcome, a signature of each of 256 members, and ids of members.
MAX_CERTIFICATE_BYTES = 640 * 2**10
# The message has a reason and the ids of a whole group.
MAX_ABORT_BYTES = 32 * 2**10
# A request has digests and indices.
MAX_REQUEST_BYTES = 1024
# A proof of a part's leaves has two digests for each of the 19 levels of a tree over MAX_PART_VALUES, 98,304 to a leaf.
MAX_OPENING_BYTES = 2 * 2**10
# The slice has a leaf of 98,304 fp32 values and a proof.
MAX_AUDITED_SLICE_BYTES = 400 * 2**10
# One member may ask for this many leaves of one part in an attempt.
MAX_DRAWS = 8
# Evidence has a signed group and one leaf of each of its members: 26 MiB for 256 members in int8, 60 KiB for five
# members and 10M values. Larger evidence is refused and convicts no member.
MAX_EVIDENCE_BYTES = 48 * 2**20
# Evidence has two signed groups.
MAX_EQUIVOCATION_BYTES = 2 * (MAX_READY_BYTES + MAX_ENVELOPE_OVERHEAD_BYTES) + 2**10
# This holds the inputs and outputs of 500 positions of a model with 4,096 columns, as fp32. Longer answers are not kept
# as evidence about a server.
MAX_SERVED_EVIDENCE_BYTES = 16 * 2**20
MAX_SHOWN_DRAWS = 4096
# A validator shows at most this many leaves of one member's slice.
MAX_SHOWN_LEAVES = 16
# The file has the evidence and the run's file, which has at most 64 KiB.
MAX_EVIDENCE_FILE_BYTES = MAX_EVIDENCE_BYTES + 65 * 2**10
# A run bans at most this many members at one time: as many as four full groups have.
MAX_BANS = 1024
# A request names the peer ids of all of them.
MAX_EVIDENCE_REQUEST_BYTES = 64 * 2**10
# Members show certificates to every newcomer, even long after the run has ended.
CERTIFICATE_LIFETIME_S = 360 * 86400.0
