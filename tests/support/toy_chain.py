"""Servers that compute hashes, a network that is a heap of arrivals, and a client that is only a `SessionState`.

A position's output is a hash of all inputs up to it, block by block, so a row that is lost, repeated or at a wrong
position changes every later token. As rounding differs between batches, an output that is computed again has other last
bytes, which change nothing that follows. Everything is drawn from one seed; a thousand histories take seconds.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial

from support.plain_records import serve_record
from swarm.router.routing import Hop
from swarm.serving.server.answer_log import AnswerLog
from swarm.serving.session.replay_buffer import ReplayBuffer
from swarm.serving.session.session_actions import (
    Action,
    AvoidPeer,
    CloseStage,
    Fail,
    FailureCause,
    Feed,
    FindServers,
    OpenStage,
    PingServers,
    Repaired,
    TakeToken,
    UpdateLink,
)
from swarm.serving.session.session_state import SessionState
from swarm.serving.session.stage import Neighbours, Stage
from swarm.serving.session.step_reports import StepReport
from swarm_protocol.errors import PeerRefused, PeerUnreachable, PeerViolation, SessionError, SwarmError
from swarm_protocol.identity import Identity
from swarm_protocol.rows import TOKENS, Rows
from swarm_protocol.served_evidence_messages import AnswerCommitment
from swarm_protocol.session_frames import SampledToken, SequenceReady

ROW_BYTES = 8
EXACT_BYTES = 6
BAD = b"\xff" * ROW_BYTES
VOCAB = 1000
PATIENCE_S = 20.0
BACKOFF_S = 1.0
CLIENT = Identity(b"c" * 32)
MISSING = SessionError("blocks are missing")

States = tuple[bytes, ...]


def ready(length: int, max_step_tokens: int) -> SequenceReady:
    """Return the message of a server that already holds `num` positions."""
    return SequenceReady(sequence_id=bytes(16), max_step_tokens=max_step_tokens, length=length)


def run_blocks(states: States, x: bytes) -> States:
    """Compute one position through blocks that each remember what came before.

    Return the new states, the last of which is the output.
    """
    return _run_blocks(states, x[:EXACT_BYTES])


@functools.lru_cache(maxsize=2**14)  # servers and checks compute the same positions again and again
def _run_blocks(states: States, x: bytes) -> States:
    new = []
    for state in states:
        x = hashlib.blake2b(state + x[:EXACT_BYTES], digest_size=ROW_BYTES).digest()
        new.append(x)
    return tuple(new)


def first_states(start: int, end: int) -> States:
    return tuple(block.to_bytes(ROW_BYTES, "little") for block in range(start, end))


def token_row(token: int) -> bytes:
    return token.to_bytes(ROW_BYTES, "little")


def wire_rows(rows: bytes, block: int) -> Rows:
    """Return inputs of `block` as they are on the wire."""
    num_rows = len(rows) // ROW_BYTES
    if block:
        return Rows(codec="raw", num_rows=num_rows, num_columns=ROW_BYTES // 4, payload=rows)
    token_ids = b"".join(row[:4] for row in rows_in(rows))
    return Rows(codec=TOKENS, num_rows=num_rows, num_columns=0, payload=token_ids)


def rows_in(rows: bytes) -> list[bytes]:
    return [rows[at : at + ROW_BYTES] for at in range(0, len(rows), ROW_BYTES)]


def outputs_of(tokens: list[int], num_blocks: int) -> list[int]:
    """Return what follows each position in one undisturbed pass."""
    states, found = first_states(0, num_blocks), []
    for token in tokens:
        states = run_blocks(states, token_row(token))
        found.append(token_after(states))
    return found


def token_after(states: States) -> int:
    return int.from_bytes(states[-1], "little") % VOCAB


@dataclass(frozen=True)
class ToyAsk:
    """What a client wants of some rows."""

    wants_token: bool
    ahead: int = 0
    num_drafts: int = 0
    _: KW_ONLY
    forward: bool


@dataclass
class ToySequence:
    start: int
    end: int
    told: Neighbours
    states: list[States]
    sequence_id: bytes
    num_links: int = 0
    busy_until_s: float = 0.0
    num_drafts: int = 0
    guessed: list[int] = field(default_factory=list)
    answered: int = 0
    reported_s: float = 0.0
    log: AnswerLog = field(init=False)

    def __post_init__(self) -> None:
        of = {"client_peer_id": CLIENT.peer_id, "sequence_id": self.sequence_id, "model": "m", "revision": "r"}
        self.log = AnswerLog(partial(AnswerCommitment, **of, start=self.start, end=self.end))

    @property
    def length(self) -> int:
        return len(self.states) - 1

    @property
    def firm_length(self) -> int:
        return self.length - self.num_drafts


@dataclass
class ToyServer:
    peer_id: str
    start: int
    end: int
    max_step_tokens: int
    is_up: bool = True
    is_leaving: bool = False
    stalled_until_s: float = 0.0
    slow_s: float = 0.0
    is_spoilt: bool = False
    sequences: dict[bytes, ToySequence] = field(default_factory=dict)
    pages: dict[tuple[int, int], list[States]] = field(default_factory=dict)


class ToyWorld:
    """One history of a session.

    `struck` counts its faults. With `draws_vary`, another sequence would draw another token. If it `has_drafts`, the
    last server guesses tokens, four of five rightly.
    """

    def __init__(
        self,
        seed: int,
        *,
        num_blocks: int,
        spans: list[tuple[int, int]],
        chunk: int = 8,
        slow_wait_s: float = math.inf,
    ) -> None:
        self.random = random.Random(seed)
        self.num_blocks = num_blocks
        self.now_s = 0.0
        self.struck: Counter[str] = Counter()
        self.repaired: list[tuple[str, int]] = []
        self.servers = {
            f"s{i}": ToyServer(f"s{i}", start, end, self.random.choice([chunk, chunk + 3]))
            for i, (start, end) in enumerate(spans)
        }
        self.cut: set[tuple[str, str]] = set()
        self.push_loss = 0.0
        self.num_rows_run = 0
        self.num_looped = 0
        self.num_drafted = 0
        self.has_drafts = False
        self._known: dict[bytes, States] = {first_states(0, num_blocks)[-1]: first_states(0, num_blocks)}
        self.num_anew = 0
        self.num_moves = 0
        self.draws_vary = False
        self.error: SwarmError | None = None
        self.outputs: list[int] = []
        self.max_delay_s = 0.02
        self.drawn: defaultdict[bytes, set[int]] = defaultdict(set)
        self.judged: list[str] = []
        self._lines = random.Random(f"lines/{seed}")
        self._slowest_s: dict[tuple[str, str], float] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._runs = itertools.count()
        self._arrival_s: dict[tuple[str, str], float] = {}
        self._closed: set[bytes] = set()
        self._avoid: dict[str, float] = {}
        self.is_answered = False
        self._due_s: float | None = None  # when the state is to be asked next, until it is told something
        self.state = SessionState(
            num_blocks, lambda block: ReplayBuffer(ROW_BYTES), max_step_tokens=chunk, slow_wait_s=slow_wait_s
        )

    # --- the client -------------------------------------------------------------------------------------------------

    def ask(self, tokens: list[int], *, ahead: int = 0) -> list[int]:
        """Return the tokens of the answer. Raises SwarmError."""
        if self.error:
            raise self.error
        self.is_answered, self.outputs = False, []
        length, states = self.state.pipeline.length, first_states(0, self.num_blocks)
        before = self.state.pipeline.buffers[0].rows(0, length) if length else b""
        for row in [*rows_in(before), *map(token_row, tokens)]:
            states = run_blocks(states, row)
            self._known[states[-1]] = states
        self.carry_out(self.state.ask(b"".join(map(token_row, tokens)), self.now_s, ahead=ahead))
        self.run_until(lambda: self.is_answered or self.error is not None)
        if self.error is not None:
            raise self.error
        return self.outputs

    def run_until(self, is_over: Callable[[], bool]) -> None:
        num_events, self._due_s = 0, None
        while not is_over():
            num_events += 1
            assert num_events < 50_000, "the session must end"
            if self._due_s is None:
                self._due_s = self.state.next_due_s()
            due_s = self._due_s
            if self._events and self._events[0][0] <= due_s:
                self.now_s, _, happen = heapq.heappop(self._events)
                happen()
            else:
                assert due_s < float("inf"), "an event must be due"
                self.now_s = max(self.now_s, due_s)
                self.carry_out(self.state.tick(self.now_s))

    def later(self, delay_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._count), happen))

    def send(self, source: str, target: str, happen: Callable[[], None]) -> None:
        """Let `happen` run after the delay of a message, in order between two peers."""
        at_s = max(self.now_s + self.delay_s(source, target), self._arrival_s.get((source, target), 0.0))
        self._arrival_s[source, target] = at_s
        heapq.heappush(self._events, (at_s, next(self._count), happen))

    def delay_s(self, source: str, target: str) -> float:
        """Return the delay of a message. Some links are always slow where there is a `max_delay_s`."""
        if (source, target) not in self._slowest_s:
            longest = math.log(self.max_delay_s)
            self._slowest_s[source, target] = math.exp(self._lines.uniform(min(math.log(0.002), longest), longest))
        return self.random.uniform(0.001, max(0.001, self._slowest_s[source, target]))

    def carry_out(self, actions: list[Action]) -> None:  # noqa: C901 a case an action
        self._due_s = None
        for action in actions:
            match action:
                case FindServers():
                    self.look(action, self.now_s + PATIENCE_S if action.repair.is_patient else 0.0)
                case OpenStage(stage):
                    self.send("client", stage.peer_id, self.opening(action))
                case Feed():
                    rows = self.state.pipeline.buffers[action.stage.start].rows(action.start, action.end)
                    assert BAD not in rows
                    self.to_server(action.stage, self.feeding(action, rows))
                case UpdateLink(stage):
                    self.to_server(stage, self.relinking(stage, stage.link.neighbours))
                case CloseStage(stage):
                    self._closed.add(stage.sequence_id)
                    sequences = self.servers[stage.peer_id].sequences
                    self.send(
                        "client",
                        stage.peer_id,
                        lambda sequences=sequences, stage=stage: sequences.pop(stage.sequence_id, None),
                    )
                case AvoidPeer(peer_id, _, cause):
                    backoff_s = 1e9 if cause is FailureCause.VIOLATION else BACKOFF_S
                    if cause is FailureCause.VIOLATION and not self.servers[peer_id].is_spoilt:
                        self.judged.append(peer_id)
                    self._avoid[peer_id] = self.now_s + backoff_s
                case PingServers():
                    self.ping(action)
                case Repaired(repair, num_tokens):
                    self.num_anew += "only others" in str(repair.error)
                    self.num_moves += repair.straggler is not None
                    self.repaired.append((repair.lost_peer, num_tokens))
                case TakeToken(token, num_drawn, goes_on):
                    assert num_drawn == len(self.outputs)
                    self.outputs.append(token.token_id)
                    assert not self.is_answered, "answered twice"
                    self.is_answered = not goes_on
                case Fail(error):
                    self.error = error

    def ping(self, action: PingServers) -> None:
        """Report later which servers did not answer at once."""
        silent = [
            stage
            for stage in action.stages
            if not (server := self.servers[stage.peer_id]).is_up or server.stalled_until_s > self.now_s
        ]
        after_s = action.timeout_s if silent else 2 * self.max_delay_s
        self.later(after_s, lambda: self.carry_out(self.state.on_pinged(silent, self.now_s)))

    def look(self, find: FindServers, give_up_s: float) -> None:
        repair = find.repair
        stages, block = [], repair.start
        left = repair.straggler.stage.peer_id if repair.straggler is not None else ""
        while block < repair.end:
            able = [
                server
                for server in self.servers.values()
                if server.is_up and not server.is_leaving and self._avoid.get(server.peer_id, 0.0) <= self.now_s
                if server.peer_id != left
                if server.start <= block < server.end
            ]
            if not able:
                if self.now_s < give_up_s:
                    self.later(0.5, lambda: self.look(find, give_up_s))
                    return
                self.later(0.01, lambda: self.carry_out(self.state.on_not_found(repair, MISSING, self.now_s)))
                return
            server = self.random.choice(able)
            end = min(server.end, repair.end)
            stages.append(self.new_stage(server.peer_id, block, end))
            block = end
        self.later(0.01, lambda: self.carry_out(self.state.on_found(repair, stages, self.now_s)))

    def new_stage(self, peer_id: str, start: int, end: int) -> Stage:
        record = serve_record(
            0, self.num_blocks, num_blocks=self.num_blocks, prefill_ms_per_token=0.1, decode_ms_per_block=0.1
        )
        hop = Hop(peer_id=peer_id, start=start, end=end, cost_ms=math.inf, record=record)
        return Stage(hop=hop, row_bytes=ROW_BYTES, sequence_id=self.random.randbytes(16))

    def hear(self, peer_id: str, stage_id: bytes, tell: Callable[[Stage], list[Action]]) -> None:
        """Handle what arrives at the client for one of its sequences."""
        stage = self.stage(stage_id)
        if stage is None or stage_id in self._closed:
            return
        try:
            self.carry_out(tell(stage))
        except PeerViolation as error:
            self.carry_out(self.state.on_lost(stage, error, FailureCause.VIOLATION, self.now_s))

    def stage(self, sequence_id: bytes) -> Stage | None:
        state = self.state
        stages = [*state.stages, *(stage for repair in state.repairs for stage in repair.new)]
        return next((stage for stage in stages if stage.sequence_id == sequence_id), None)

    def check_draws(self, prompt: list[int]) -> None:
        """Check that each token of the answer was drawn after those before it."""
        states = first_states(0, self.num_blocks)
        for token in prompt:
            states = run_blocks(states, token_row(token))
        for token in self.outputs:
            assert token in self.drawn[states[-1]]
            states = run_blocks(states, token_row(token))

    def check_states(self) -> None:
        """Check that the servers' states follow from the tokens that the client knows, and from nothing else."""
        tokens = self.state.pipeline.buffers[0].rows(0, self.state.pipeline.length)
        states = [first_states(0, self.num_blocks)]
        for position in range(self.state.pipeline.length):
            states.append(run_blocks(states[-1], tokens[position * ROW_BYTES : (position + 1) * ROW_BYTES]))
        for stage in self.state.stages:
            sequence = self.servers[stage.peer_id].sequences.get(stage.sequence_id)
            firm = sequence.states[: sequence.firm_length + 1] if sequence else ()
            for ours, held in zip(states, firm, strict=False):
                assert held == ours[stage.start : stage.end]

    # --- a server ---------------------------------------------------------------------------------------------------

    def to_server(self, stage: Stage, happen: Callable[[ToyServer], None]) -> None:
        self.send("client", stage.peer_id, lambda: self.at_server(stage.peer_id, happen))

    def at_server(self, peer_id: str, happen: Callable[[ToyServer], None]) -> None:
        server = self.servers[peer_id]
        if not server.is_up:
            return
        if server.stalled_until_s > self.now_s:
            self.later(server.stalled_until_s - self.now_s, lambda: self.at_server(peer_id, happen))
        else:
            happen(server)

    def to_client(self, server: ToyServer, sequence_id: bytes, tell: Callable[[Stage], list[Action]]) -> None:
        self.send(server.peer_id, "client", lambda: self.hear(server.peer_id, sequence_id, tell))

    def end_sequence(self, server: ToyServer, sequence_id: bytes, error: SwarmError) -> None:
        server.sequences.pop(sequence_id, None)
        self.to_client(
            server, sequence_id, lambda stage: self.state.on_lost(stage, error, FailureCause.REPORTED, self.now_s)
        )

    def opening(self, action: OpenStage) -> Callable[[], None]:
        stage, told, num_known = action.stage, action.stage.link.neighbours, action.stage.may_skip // 16 * 16

        def happen(server: ToyServer) -> None:
            if server.is_leaving:
                self.end_sequence(server, stage.sequence_id, PeerRefused("leaving"))
                return
            old = self.servers[action.taken_over.peer_id] if action.taken_over else None
            states = [first_states(stage.start, stage.end)]
            if old is not None:
                sequence = old.sequences.get(action.taken_over.sequence_id) if old.is_up else None
                if sequence is None or self.random.random() < 0.2:
                    self.struck["hand-over"] += 1
                    self.end_sequence(server, stage.sequence_id, PeerRefused("no hand-over"))
                    return
                cut = slice(stage.start - sequence.start, stage.end - sequence.start)
                states = [each[cut] for each in sequence.states[: sequence.firm_length + 1]]
            elif kept := server.pages.get((stage.start, stage.end)):
                states = kept[: min(num_known, (len(kept) - 1) // 16 * 16) + 1]
            server.sequences[stage.sequence_id] = ToySequence(stage.start, stage.end, told, states, stage.sequence_id)
            length = len(states) - 1
            self.to_client(
                server,
                stage.sequence_id,
                lambda stage: self.state.on_opened(stage, ready(length, server.max_step_tokens), self.now_s),
            )

        delay_s = 0.05 if action.taken_over else 0.0
        return lambda: self.later(delay_s, lambda: self.at_server(stage.peer_id, happen))

    def feeding(self, action: Feed, rows: bytes) -> Callable[[ToyServer], None]:
        assert len(self.outputs) == action.num_drawn or not action.wants_token
        ask = ToyAsk(action.wants_token, action.ahead, forward=action.forward)
        return lambda server: self.step(server, action.stage.sequence_id, action.start, rows, ask)

    def relinking(self, stage: Stage, told: Neighbours) -> Callable[[ToyServer], None]:
        def happen(server: ToyServer) -> None:
            if sequence := server.sequences.get(stage.sequence_id):
                sequence.told = told
                sequence.num_links += 1
                num_links, length = sequence.num_links, sequence.firm_length
                self.to_client(
                    server,
                    stage.sequence_id,
                    lambda stage: self.state.on_link_ack(stage, num_links, length, self.now_s),
                )

        return happen

    def step(self, server: ToyServer, sequence_id: bytes, position: int, rows: bytes, ask: ToyAsk) -> None:
        sequence = server.sequences.get(sequence_id)
        if sequence is None:
            return
        if position > sequence.length:
            self.end_sequence(server, sequence_id, PeerViolation("a gap"))
            return
        new, num_drafts = rows_in(rows), ask.num_drafts
        num_run = max(0, min(len(new) - num_drafts, sequence.firm_length - position))
        if num_run == len(new) - num_drafts:
            return
        new, position = new[num_run:], position + num_run
        if num_drafts:  # a server may drop some, and the last one those that it did not make
            most = self.random.randint(0, num_drafts)
            most = min(most, len(sequence.guessed)) if sequence.end == self.num_blocks else most
            new, num_drafts = new[: len(new) - num_drafts + most], most
        assert len(new) <= server.max_step_tokens + num_drafts or position == 0
        del sequence.states[position + 1 :]
        for row in new:
            sequence.states.append(run_blocks(sequence.states[-1], row))
        sequence.num_drafts = num_drafts
        self.num_rows_run += len(new)
        sequence.log.took(position, wire_rows(b"".join(new), sequence.start))
        outputs = [self._as_computed_now(states[-1]) for states in sequence.states[position + 1 :]]
        tokens = self.draw(sequence, ask) if sequence.end == self.num_blocks and ask.wants_token else []
        # the pages of a prompt that a server keeps; there is one prompt, so they need no names
        firm = sequence.states[: sequence.firm_length + 1]
        if not self.draws_vary and len(server.pages.get((sequence.start, sequence.end), ())) < len(firm):
            server.pages[sequence.start, sequence.end] = firm
        sequence.busy_until_s = max(sequence.busy_until_s, self.now_s) + self.random.uniform(0.0005, 0.01)
        sequence.busy_until_s += server.slow_s
        if server.is_spoilt:
            outputs[-1] = BAD
        ask = replace(ask, num_drafts=num_drafts)
        reply = partial(self.reply, server, sequence, position, outputs, ask)
        if tokens:
            reply = partial(self.reply_tokens, server, sequence, position + len(outputs) - num_drafts, tokens, ask)
        self.later(sequence.busy_until_s - self.now_s, reply)

    def _as_computed_now(self, output: bytes) -> bytes:
        return output[:EXACT_BYTES] + (next(self._runs) % 2**16).to_bytes(ROW_BYTES - EXACT_BYTES, "little")

    def token_after(self, sequence: ToySequence, output: bytes) -> int:
        if self.draws_vary:
            output = hashlib.blake2b(sequence.sequence_id + output, digest_size=ROW_BYTES).digest()
        return int.from_bytes(output, "little") % VOCAB

    def draw(self, sequence: ToySequence, ask: ToyAsk) -> list[int]:
        """Draw at the last server, which keeps the drafts that are right and guesses the next ones."""
        tokens, at, drafts = list[int](), sequence.firm_length, sequence.guessed[: sequence.num_drafts]
        while not tokens or tokens[-1:] == drafts[len(tokens) - 1 : len(tokens)]:
            at += bool(tokens)
            output = sequence.states[at][-1]
            tokens.append(self.token_after(sequence, output))
            self.drawn[output].add(tokens[-1])
        del sequence.states[at + 1 :]
        sequence.num_drafts, sequence.guessed = 0, []
        # the states of all blocks, which no server has, so that some guesses are right
        full = self._known.get(sequence.states[at - len(tokens) + 1][-1])
        for token in tokens if full else ():
            full = run_blocks(full, token_row(token))
            self._known[full[-1]] = full
        most = min(ask.ahead - len(tokens), 5) if full and self.has_drafts else 0
        for _ in range(self.random.randint(0, max(0, most))):
            token = self.token_after(sequence, full[-1])
            sequence.guessed.append(token if self.random.random() < 0.8 else (token + 1) % VOCAB)
            full = run_blocks(full, token_row(token))
        return tokens

    def reply_tokens(
        self, server: ToyServer, sequence: ToySequence, position: int, tokens: list[int], ask: ToyAsk
    ) -> None:
        """Send what the last server has drawn, and push the last token to the first server, with drafts."""
        if sequence.sequence_id not in server.sequences or not server.is_up:
            return
        looped, sequence.answered = False, position + len(tokens) - 1
        if ask.ahead >= len(tokens) and sequence.told.downstream:
            ahead = ToyAsk(True, ask.ahead - len(tokens), len(sequence.guessed), forward=True)
            rows = b"".join(map(token_row, (tokens[-1], *sequence.guessed)))
            looped = self.push(server, sequence.sequence_id, sequence.told.downstream, sequence.answered, rows, ahead)
        if not looped:
            sequence.guessed = []
        self.num_looped += looped
        self.num_drafted += len(tokens) - 1
        for index, token in enumerate(tokens, 1):
            ran = StepReport(
                position=position + index - 1,
                token=SampledToken(token_id=token),
                looped=looped and index == len(tokens),
                drafted=index < len(tokens),
                num_links=sequence.num_links,
            )
            self.report(server, sequence, ran)

    def reply(self, server: ToyServer, sequence: ToySequence, position: int, outputs: list[bytes], ask: ToyAsk) -> None:
        if sequence.sequence_id not in server.sequences or not server.is_up:
            return
        assert not ask.wants_token or ask.forward, "only the last server returns a token"
        rows, push_failed, to = b"", False, sequence.told.downstream
        forward = ask.forward and sequence.end < self.num_blocks
        if forward:
            rows = b"".join(outputs)
            push_failed = to is not None and not self.push(server, sequence.sequence_id, to, position, rows, ask)
            sequence.log.gave(position, wire_rows(rows, sequence.end))
        ran = StepReport(
            position=position + len(outputs),
            rows=rows,
            push_failed=push_failed,
            num_links=sequence.num_links,
            num_drafts=ask.num_drafts,
        )
        sequence.answered = ran.firm_end
        is_token = len(outputs) - ask.num_drafts == 1
        self.report(server, sequence, ran, can_wait=forward and to is not None and is_token)

    def push(self, server: ToyServer, source: bytes, to: Stage, position: int, rows: bytes, ask: ToyAsk) -> bool:
        """Push to another server. Return False if the sender notices that this failed."""
        receiver = to.peer_id
        if receiver == server.peer_id:
            assert to.sequence_id in server.sequences, "no server may dial itself"
            self.step(server, to.sequence_id, position, rows, ask)
            return True
        if (server.peer_id, receiver) in self.cut:
            self.struck["cut"] += 1
            return self.random.random() < 0.3
        if self.random.random() < self.push_loss:
            self.struck["push lost"] += 1
            return True

        def happen(target: ToyServer) -> None:
            sequence = target.sequences.get(to.sequence_id)
            if (
                sequence is None
                or sequence.told.upstream is None
                or sequence.told.upstream.sequence_id != source
                or BAD in rows
                or position > sequence.length
                or len(rows) > ROW_BYTES * (target.max_step_tokens + ask.num_drafts)
            ):
                self.refused(server, source)
                return
            self.step(target, to.sequence_id, position, rows, ask)

        self.send(server.peer_id, receiver, lambda: self.at_server(receiver, happen))
        return True

    def refused(self, server: ToyServer, sequence_id: bytes) -> None:
        """Report that the next server refused a push, or is gone."""
        sequence = server.sequences.get(sequence_id)
        if server.is_up and sequence is not None and sequence.answered:
            ran = StepReport(position=sequence.answered, push_failed=True, num_links=sequence.num_links)
            self.report(server, sequence, ran)

    def report(self, server: ToyServer, sequence: ToySequence, ran: StepReport, can_wait: bool = False) -> None:
        """Send a report, which a server may hold back for 0.1 s, but not behind the next one."""
        is_bad = server.is_spoilt and ran.token is not None
        wait_s = self.random.uniform(0.0, 0.1) if can_wait and self.has_drafts else 0.0
        at_s = sequence.reported_s = max(sequence.reported_s, self.now_s + wait_s)
        self.later(
            at_s - self.now_s,
            lambda: self.to_client(server, sequence.sequence_id, lambda stage: self.heard_result(stage, ran, is_bad)),
        )

    def heard_result(self, stage: Stage, ran: StepReport, is_bad: bool) -> list[Action]:
        if BAD in rows_in(ran.rows) or is_bad:
            raise PeerViolation("not finite")
        return self.state.on_report(stage, ran, self.now_s)

    # --- what goes wrong --------------------------------------------------------------------------------------------

    def break_connection(self, server: ToyServer, error: SwarmError, delay_s: float = 0.0) -> None:
        sequences, server.sequences = server.sequences, {}
        for other in self.servers.values():
            for sequence in list(other.sequences.values()):
                to = sequence.told.downstream
                if other is not server and to is not None and to.sequence_id in sequences:
                    self.later(self.random.uniform(0, 0.01), partial(self.refused, other, sequence.sequence_id))

        def tell() -> None:
            state = self.state
            stages = [*state.stages, *(stage for repair in state.repairs for stage in repair.new)]
            for stage in stages:
                if stage.peer_id == server.peer_id and (stage.sequence_id in sequences or not server.is_up):
                    self.carry_out(self.state.on_lost(stage, error, FailureCause.SILENT, self.now_s))

        self.later(delay_s, tell)

    def wait(self, seconds: float) -> None:
        """Let time pass without a request."""
        end_s, is_over = self.now_s + seconds, []
        self.later(seconds, lambda: is_over.append(end_s))
        self.run_until(lambda: bool(is_over))

    def strike(self, what: str, server: ToyServer) -> None:  # noqa: C901 a case a fault
        if not server.is_up:
            return
        self.struck[what] += 1
        match what:
            case "kill":
                server.is_up = False
                self.break_connection(server, PeerUnreachable("killed"), self.random.uniform(0, 0.01))
            case "connection":
                self.break_connection(server, PeerUnreachable("the connection broke"))
            case "evict":
                for sequence_id in list(server.sequences):
                    self.end_sequence(server, sequence_id, PeerRefused("evicted"))
            case "full":
                for sequence_id in list(server.sequences):
                    self.end_sequence(server, sequence_id, PeerRefused("full", retry_after_s=1.0, lacks_room=True))
            case "late":
                for sequence in server.sequences.values():
                    sequence.busy_until_s = max(sequence.busy_until_s, self.now_s) + self.random.choice(
                        [0.3, 1.0, 2.0, 4.9]
                    )
            case "stall":
                server.stalled_until_s = self.now_s + self.random.choice([1.0, 4.0, 30.0])
            case "leave":
                server.is_leaving = True
                for sequence_id in server.sequences:
                    self.to_client(server, sequence_id, self.told_to_leave)
                self.later(self.random.uniform(0.1, 5), lambda: self.strike("evict", server))
            case "slow":
                server.slow_s = self.random.choice([0.1, 0.4])
            case "spoil":
                server.is_spoilt = True
            case "cut":
                self.cut |= {(server.peer_id, other) for other in self.servers}
            case "loss":
                self.push_loss = 0.3

    def told_to_leave(self, stage: Stage) -> list[Action]:
        return self.state.on_leaving(stage, self.now_s)


@dataclass(frozen=True, kw_only=True)
class Request:
    """For each request: how many tokens may be drawn ahead, and the pause after it."""

    prompt: list[int]
    questions: list[tuple[int, float]]


KINDS = ("kill", "connection", "evict", "full", "late", "stall", "slow", "leave", "spoil", "cut", "loss")


def any_world(seed: int) -> tuple[ToyWorld, Request]:
    """Return a world, its faults, and a request, all drawn from the seed."""
    draw = random.Random(f"world/{seed}")
    num_blocks = draw.randint(1, 5)
    cuts = sorted(draw.sample(range(1, num_blocks), draw.randint(0, num_blocks - 1)))
    spans = list(itertools.pairwise([0, *cuts, num_blocks])) * draw.choice([2, 2, 3])
    spans += [(0, num_blocks)] * draw.choice([0, 1, 1])
    world = ToyWorld(seed, num_blocks=num_blocks, spans=spans, chunk=draw.choice([1, 4, 16]), slow_wait_s=0.0)
    world.has_drafts = random.Random(f"drafts/{seed}").random() < 0.7
    for _ in range(draw.choice([0, 1, 1, 2, 3, 5, 8])):
        strike = partial(world.strike, draw.choice(KINDS), draw.choice(list(world.servers.values())))
        world.later(draw.expovariate(2.0), strike)
    prompt = [draw.randrange(VOCAB) for _ in range(draw.choice([1, 3, 16, 40, 70]))]
    num_questions = draw.randint(1, 12)
    questions = [(draw.choice([0, 0, 0, 1, 6, 20]), draw.choice([0, 0, 0, 0.5, 3])) for _ in range(num_questions)]
    return world, Request(prompt=prompt, questions=questions)


def answers(world: ToyWorld, request: Request) -> Iterator[tuple[list[int], list[int]]]:
    """Return the answer to each request, and that of one undisturbed machine. Raises SwarmError."""
    new, states = request.prompt, first_states(0, world.num_blocks)
    for ahead, pause_s in request.questions:
        for token in new:
            states = run_blocks(states, token_row(token))
        expected = [token_after(states)]
        for _ in range(ahead):
            states = run_blocks(states, token_row(expected[-1]))
            expected.append(token_after(states))
        answer = world.ask(new, ahead=ahead)
        yield answer, expected
        new = expected[-1:]
        world.wait(pause_s)
