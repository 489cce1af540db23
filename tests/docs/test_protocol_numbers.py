"""Numbers in the specification that are no protocol limits, but bounds and times of one side, equal those in
the code.
"""

from __future__ import annotations

from support.site_pages import written
from swarm.network import announcer, framing, peer_budgets, peer_methods
from swarm.network.dht import known_peers, record_dht, record_storage, routing_table
from swarm.network.discovery import mdns_messages
from swarm.network.libp2p import (
    calls,
    connection_limit,
    kept_frames,
    p2pd_process,
    path_watch,
    reconnection,
    stream_resume,
)
from swarm.network.relay import relay, relay_access, reservations
from swarm.serving import peer_shares
from swarm.serving.evidence import server_convictions
from swarm.serving.server import (
    connection_server,
    forward_server,
    push_connections,
    session_queues,
    session_sampler,
    waiting_clients,
)
from swarm.serving.session import pipeline, repair
from swarm.training.allreduce import butterfly, leaf_checks, part_streams, parts, peer_connections
from swarm.training.member import members_watch, round_service
from swarm.training.round import round_state
from swarm.training.run import signed_run
from swarm.training.state import certificate_history as history
from swarm.training.state import lease, replica_state, run_context, state_transfer
from swarm_compression.codec import CUT_VALUES
from swarm_protocol import limits, run_credentials
from swarm_protocol.version import PROTOCOL_VERSION

PAGES = {path.rsplit("/", 1)[-1]: " ".join(text.split()) for path, text in written("reference/protocol").items()}
MIB = 2**20

SAID = [
    ("rounds.md", f"If there are more than {lease.MAX_HOLES:,} holes"),
    ("index.md", f"the protocol of version {PROTOCOL_VERSION}, as"),
    ("index.md", f"`PROTOCOL_VERSION` is {PROTOCOL_VERSION}."),
    ("identity.md", f"at most {signed_run.MAX_RUN_FILE_BYTES // 1024} KiB"),
    ("transport.md", f"A request larger than {peer_budgets.MAX_UNARY_BYTES // 1024} KiB"),
    ("transport.md", f"The response is larger than {peer_budgets.MAX_UNARY_BYTES // 1024} KiB"),
    ("transport.md", f"no answer of more than {peer_budgets.MAX_UNARY_BYTES // 1024} KiB"),
    ("transport.md", f"a message of more than {p2pd_process.MAX_UNARY_MESSAGE_BYTES // 1024} KiB"),
    ("records.md", f"An answer larger than {peer_budgets.MAX_UNARY_BYTES // 1024} KiB is cut"),
    ("transport.md", f"A response is kept for {calls.PARCEL_S:.0f} seconds"),
    ("transport.md", f"at most {calls.MAX_PARCELS_PER_PEER_BYTES // MIB} MiB for a peer"),
    ("transport.md", f"{calls.MAX_PARCELS_BYTES // MIB} MiB in all"),
    ("transport.md", f"on their way may have {calls.MAX_LEAVING_BYTES // MIB} MiB together"),
    ("transport.md", f"the last piece of a message, at most {framing.CHUNK_BYTES // MIB} MiB"),
    ("transport.md", f"Each side begins with a credit of {framing.WINDOW_BYTES // MIB} MiB"),
    ("transport.md", f"A piece costs its length and {framing.FRAME_COST_BYTES} bytes"),
    ("transport.md", f"and {peer_budgets.MAX_CALLS:,} in all"),
    ("transport.md", f"at most {peer_budgets.MAX_STREAMS_PER_PEER} streams of one peer"),
    ("transport.md", f"{stream_resume.ID_BYTES} random bytes, the id of the stream"),
    ("transport.md", f"(within {peer_methods.OPENING_TIMEOUT_S:.0f} seconds)"),
    ("transport.md", f"once the frames since the last one have cost {framing.RIDING_ACK_BYTES // 1024} KiB"),
    ("transport.md", f"at the latest when they have cost {framing.ACK_BYTES // 1024} KiB"),
    ("transport.md", f"without a connection for {reconnection.HOLD_S:.0f} seconds"),
    (
        "transport.md",
        f"at most {stream_resume.MAX_HELD_PER_PEER} streams of one peer and {stream_resume.MAX_HELD:,} in all",
    ),
    ("transport.md", f"is not asked for {stream_resume.NUDGE_S} seconds"),
    ("transport.md", f"and for {reconnection.GRACE_S:.0f} seconds if the other side closed it"),
    ("transport.md", f"not reached within {reconnection.YIELD_S} seconds"),
    (
        "transport.md",
        f"for each peer ({kept_frames.PEER_BYTES // MIB} MiB) and for all ({kept_frames.HOST_BYTES // MIB}",
    ),
    ("transport.md", f"nothing came for {path_watch.PATH_SILENT_S:.0f} second"),
    ("transport.md", f"Without an echo within {path_watch.ECHO_S:.0f} seconds"),
    ("transport.md", f"up to {path_watch.MAX_ECHO_S:.0f} seconds"),
    ("transport.md", f"after {path_watch.KEEP_ALIVE_S:.0f} seconds of silence"),
    ("transport.md", f"the largest message and {(peer_budgets.PEER_BYTES - limits.MAX_MESSAGE_BYTES) // MIB} MiB"),
    ("transport.md", f"({peer_budgets.HOST_BYTES // MIB} MiB)"),
    ("relay.md", f"within | {relay.OPENING_TIMEOUT_S:.0f} s |"),
    ("relay.md", f"after {reservations.MIN_PAUSE_S} seconds, doubling up to {reservations.MAX_PAUSE_S:.0f}"),
    (
        "relay.md",
        f"after {reservations.MIN_KNOWN_PAUSE_S:.0f} seconds, doubling up to {reservations.MAX_KNOWN_PAUSE_S:.0f}",
    ),
    ("relay.md", f"answered within | {relay_access.GREETING_TIMEOUT_S:.0f} s |"),
    ("relay.md", f"holds for {relay_access.NETWORK_PEER_S:.0f} seconds, a refusal for {relay_access.STRANGER_S:.0f}"),
    ("relay.md", f"carries in {relay_access.PIECE_S * 1000:.0f} milliseconds"),
    (
        "relay.md",
        f"at least {relay_access.MIN_PIECE_BYTES // 1024} KiB and at most {relay_access.MAX_PIECE_BYTES // 1024} KiB",
    ),
    ("relay.md", f"for {reservations.RELEASE_S:.0f} seconds"),
    ("relay.md", f"At most {reservations.MAX_RELAY_ADDRS} addresses of a relay"),
    ("records.md", f"| {routing_table.BUCKET_SIZE} members, and as many that wait"),
    ("records.md", f"the {routing_table.WIDTH} nearest"),
    ("records.md", f"the {record_dht.NUM_REPLICAS} nearest nodes"),
    ("records.md", f"asks the {routing_table.SAMPLE_WIDTH} nearest nodes"),
    ("records.md", f"at most {routing_table.MAX_CALLS} for each key"),
    ("records.md", f"deadline of one call | {known_peers.RPC_TIMEOUT_S:.0f} s"),
    ("records.md", f"neighbours, the {routing_table.NARROW_WIDTH} nearest, and {routing_table.WIDTH} after a second"),
    (
        "records.md",
        f"left out of searches for | {routing_table.SUSPECT_S:.0f} s, twice as long each further time, at most "
        f"{routing_table.MAX_SUSPECT_S:.0f} s",
    ),
    ("records.md", f"is pinged every two minutes, if that is | {record_dht.DOUBT_S / 60:.0f} minutes"),
    ("records.md", f"{2 * announcer.SETTLING_S / 60:.0f} minutes lives twice as long"),
    ("records.md", f"{announcer.MAX_LIVES} times as long after {announcer.MAX_LIVES * announcer.SETTLING_S / 60:.0f}"),
    ("records.md", f"of a signer {record_storage.MAX_KEYS_PER_SIGNER} keys, in all {record_storage.MAX_KEYS:,} keys"),
    ("records.md", f"and {record_storage.MAX_BYTES // MIB} MiB"),
    ("sessions.md", f"until it is admitted, for {peer_shares.WAIT_S:.0f} s at most"),
    ("sessions.md", f"else after `retry_after_s` ({peer_shares.RETRY_AFTER_S:.0f} s)"),
    (
        "sessions.md",
        f"refused for want of room {waiting_clients.REFUSED_PER_S:.0f} times a second at most, or "
        f"{waiting_clients.REFUSED_PER_S * peer_shares.RETRY_AFTER_S:.0f} times at once",
    ),
    ("sessions.md", f"refused to a peer for {peer_shares.KEPT_AFTER_S:.0f} s"),
    ("sessions.md", f"until {peer_shares.KEPT_UNTIL_S:.0f} s after the first refusal"),
    ("sessions.md", f"At most {session_queues.MAX_INBOX} steps wait"),
    ("sessions.md", f"After {push_connections.MAX_REFUSED} refusals"),
    ("sessions.md", f"at most {push_connections.MAX_PEERS[-1]} next servers that one client named"),
    ("sessions.md", f"named, {push_connections.MAX_PEERS[1]} that clients of one provider's network named"),
    ("sessions.md", f"and to {push_connections.MAX_PEERS[0]} in all"),
    ("sessions.md", f"held back for {session_queues.REPORT_S} s"),
    ("sessions.md", f"A peer may have {connection_server.MAX_CONNECTIONS_PER_PEER} such streams"),
    ("sessions.md", f"after {connection_server.IDLE_CONNECTION_S:.0f} s without a sequence"),
    (
        "sessions.md",
        f"tried again after {pipeline.RELINK_S:.0f} s, doubling up to {pipeline.MAX_RELINK_S / 60:.0f} minutes",
    ),
    ("sessions.md", f"After {repair.MAX_FAILURES} failures of servers"),
    ("sessions.md", f"and {forward_server.MAX_CALL_S:.0f} s"),
    ("rounds.md", f"`max_uses` from 1 to {run_credentials.MAX_USES}"),
    ("rounds.md", f"chunks of {replica_state.CHUNK_BYTES // MIB} MiB"),
    ("rounds.md", f"head has at most {replica_state.MAX_HEAD_BYTES // MIB} MiB"),
    ("rounds.md", f"({round_state.FIRST_REST_S} s, doubling to {round_state.MAX_REST_S:.0f} s)"),
    ("rounds.md", f"at least {run_context.FOUNDING_GRACE_S:.0f} s for a run's first group"),
    (
        "rounds.md",
        f"`reduce_s` = {run_context.SPARE_REDUCE_S:.0f} s + 2 × encoded bytes ÷ "
        f"{peer_connections.SLOWEST_MEMBER_BYTES_PER_S:,.0f} ÷ {part_streams.SLICES_SHARE}",
    ),
    ("rounds.md", f"After {part_streams.SLICES_SHARE} of `reduce_s` an owner gives up"),
    ("rounds.md", f"after {part_streams.RESULTS_SHARE} the others for an owner"),
    ("rounds.md", f"after {part_streams.AUDITS_SHARE} auditors"),
    ("rounds.md", f"`vote_s` = {run_context.SPARE_VOTE_S:.0f} s + N ÷ {run_context.SLOWEST_VALUES_PER_S:,.0f}"),
    ("rounds.md", f"between 1/{parts.NOISE} and {parts.NOISE} becomes 1"),
    ("rounds.md", f"cut to 1/{parts.MAX_SKEW:.0f} and {parts.MAX_SKEW:.0f}"),
    ("rounds.md", f"L is N ÷ {parts.LEAST_LEAVES:,}, rounded down to a multiple of {CUT_VALUES}, at least"),
    ("rounds.md", f"whole leaves as fit {parts.FRAME_VALUES:,} values"),
    ("rounds.md", f"asks {members_watch.NUM_WATCHED} other members every {members_watch.WATCH_S:.0f} s for their"),
    ("rounds.md", f"with its proofs at most {100 * leaf_checks.BYTES_SHARE:.1f} % of the bytes"),
    ("rounds.md", f"or {leaf_checks.LEAST_BYTES >> 10} KiB; else"),
    (
        "rounds.md",
        f"({butterfly.AHEAD_FRAMES} in all directions together, at least {parts.MIN_AHEAD_FRAMES} each)",
    ),
    (
        "rounds.md",
        f"at most {history.MAX_HISTORY_LINKS}, {history.MAX_HISTORY_BYTES // MIB} MiB",
    ),
    ("rounds.md", f"asks up to {history.MAX_ASKED_FOR_STANDING} members"),
    ("rounds.md", f"sends nothing for {peer_connections.QUIET_S:.0f} s"),
    ("rounds.md", f"without an answer within {peer_connections.SILENT_S:.0f} s"),
    ("rounds.md", f"whose step it does not begin within {round_service.OPENING_S:.0f} s"),
    ("rounds.md", f"if its first message does not come within {round_service.OPENING_S:.0f} s"),
    ("manifests.md", f"within {server_convictions.GIVE_TIMEOUT_S:.0f} s, or the server ends the stream"),
    ("manifests.md", f"and for the same peer every {server_convictions.SHOWN_AGAIN_S:.0f} s"),
    ("sessions.md", f"after {session_sampler.RECALL_S:.0f} s the sequence ends"),
    ("transport.md", f"A TXT string has at most {mdns_messages.MAX_STRING_BYTES} bytes"),
    ("transport.md", f"keeps at most {connection_limit.MAX_PEERS:,} connections"),
    ("rounds.md", f"in messages of {state_transfer.PIECE_BYTES // MIB} MiB"),
]


def test_protocol_pages_have_the_numbers_of_the_code() -> None:
    assert [(page, words) for page, words in SAID if words not in PAGES[page]] == []
