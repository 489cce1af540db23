"""Swarms that the dashboard is shown with: empty, small, of 1,000 nodes, and with names that mean harm.

`example_source(num_nodes)` shows plausible values, the same on every call but for the time.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from random import Random

from support.dashboard_source import ExampleSource
from swarm.network.traffic import PATH_KINDS
from swarm_node.dashboard.view_builder import counted_paths
from swarm_node.dashboard.views import (
    BanView,
    ChainView,
    ChangeEvent,
    CheckpointFile,
    ContributorView,
    ModelDetail,
    ModelView,
    NodeDetail,
    NodeView,
    Overview,
    PathView,
    PresenceView,
    RefusalView,
    RevisionView,
    RunDetail,
    RunView,
    Series,
    ServerView,
    SpanView,
    StepView,
)
from swarm_protocol.limits import MAX_OUTER_STEP
from swarm_protocol.records import PathCounts

DAY_S = 86_400.0
NAMES = (
    *("cedar", "birch", "maple", "rowan", "hazel", "aspen", "linden", "alder", "juniper", "willow", "larch", "elm"),
    *("fern", "heron", "otter", "finch", "wren", "kestrel", "marten", "lynx", "plover", "swift", "thrush", "ibis"),
)
DEVICES = (
    ("NVIDIA GeForce RTX 4090", 24, 52.0),
    ("NVIDIA GeForce RTX 3060", 12, 21.0),
    ("NVIDIA A100-SXM4-80GB", 80, 78.0),
    ("Apple M2 Max", 64, 24.0),
    ("AMD Ryzen 9 7950X (CPU)", 64, 6.5),
    ("NVIDIA T4", 16, 14.0),
)
HOSTILE_NAMES = (
    "<script>document.title='owned'</script>",
    '"><img src=x onerror="document.title=1">',
    "\u202eevil\u202c\u2066right to left",
    "bell\x07 null\x00 escape\x1b[31m line\nbreak",
    "z\u0351\u036b\u0343\u036a\u0302\u036b\u033d\u034f\u0334\u0319\u0324\u031e\u0349\u035a\u032f\u031e\u0320algo",
    "{{ 7 * 7 }}{% raw %}",
    "../../etc/passwd",
    "javascript:alert(1)",
    "W" * 10_000,
    "   ",
    "",
    "\u200b\u200b\ufeff nothing to see",
)
MODELS = (("Qwen/Qwen3-8B", 36), ("meta-llama/Llama-3.3-70B", 80), ("HuggingFaceTB/SmolLM2-360M", 32))
PHASES_S = {"interval": 184.0, "group": 1.9, "reduce": 21.4, "commit": 0.8, "apply": 2.6}


def peer_id(number: int) -> str:
    digest = hashlib.sha256(f"peer {number}".encode()).hexdigest()
    return f"12D3KooW{digest[:44]}"


def example_source(num_nodes: int, *, hostile: bool = False, now: Callable[[], float] = time.time) -> ExampleSource:
    """A swarm of `num_nodes`: 0 knows nothing at all; `hostile` gives everything that has a name a bad one."""
    return _Invention(num_nodes, hostile=hostile, at=now()).source()


def _from_here(number: int) -> PathView | None:
    """Every third node is not connected, and of some the round trip is not known."""
    if number % 3 == 0:
        return None
    rtt_ms = None if number % 7 == 1 else 0.4 + number % 200
    return PathView(
        kind=PATH_KINDS[number % 4], rtt_ms=rtt_ms, sent_bytes=number * 7 * 2**20, received_bytes=number // 9 * 2**20
    )


class _Invention:
    def __init__(self, num_nodes: int, *, hostile: bool, at: float) -> None:
        self.random = Random(7)
        self.num_nodes = num_nodes
        self.hostile = hostile
        self.at = at
        self.serving: dict[str, list[ServerView]] = {}
        self.training: dict[str, list[ContributorView]] = {}
        models = [] if not num_nodes else MODELS[:1] if num_nodes < 100 else MODELS
        self.models = {self._named(name, i): blocks for i, (name, blocks) in enumerate(models)}
        self.run_ids = [
            f"story-{hashlib.sha256(f'run {i}'.encode()).hexdigest()[:12]}" for i in range(min(2, len(self.models)))
        ]
        self.peers = [peer_id(number) for number in range(num_nodes)]
        self.workers = self.peers[2:]  # the first two are a seed and a gateway
        self.names = {peer: self._named(self._node_name(i), i + 3) for i, peer in enumerate(self.peers)}

    def _named(self, good: str, number: int) -> str:
        return HOSTILE_NAMES[number % len(HOSTILE_NAMES)] if self.hostile else good

    def _node_name(self, number: int) -> str:
        return NAMES[number % len(NAMES)] + (f"-{number // len(NAMES) + 1}" if number >= len(NAMES) else "")

    def source(self) -> ExampleSource:
        models = {name: self._model(name, blocks) for name, blocks in self.models.items()}
        runs = {run: self._run(run, i) for i, run in enumerate(self.run_ids)}
        nodes = {peer: self._node(i, peer) for i, peer in enumerate(self.peers)}
        return ExampleSource(
            shown=self._overview(models, runs, nodes),
            model_details=models,
            run_details=runs,
            node_details=nodes,
            all_series=self._series() if self.num_nodes else {},
        )

    # --- models ---------------------------------------------------------------------------------------------------

    def _model(self, name: str, num_blocks: int) -> ModelDetail:
        servers: list[ServerView] = []
        takers = [peer for i, peer in enumerate(self.workers) if i % 3 != 2 or self.num_nodes < 100]
        which = list(self.models).index(name)  # of many nodes the second model lacks its end, the third has few servers
        if self.num_nodes < 100:
            takers = takers[: max(6, self.num_nodes * 3 // 4)]
        else:
            takers = takers[which :: len(self.models)][: 3 if which == 2 else None]
        span = num_blocks // 3
        for i, peer in enumerate(takers):
            start = (i % 3) * span if i < 6 else self.random.randrange(0, num_blocks - span + 1)
            end = num_blocks if i % 3 == 2 and i < 6 else start + span
            servers.append(self._server(name, peer, start, min(end, num_blocks - (which == 1)), i))
        servers.sort(key=lambda server: (server.start, server.end, server.peer_id))
        for server in servers:
            self.serving.setdefault(server.peer_id, []).append(server)
        replicas = tuple(
            sum(
                server.start <= block < server.end and server.state == "serving" and server.convicted is None
                for server in servers
            )
            for block in range(num_blocks)
        )
        return ModelDetail(
            model=self._model_view(name, num_blocks, servers, replicas),
            servers=tuple(servers),
            replicas=replicas,
            chains=tuple(sorted(self._chains(servers, num_blocks), key=lambda chain: chain.ms_per_token)),
        )

    def _server(self, name: str, peer: str, start: int, end: int, i: int) -> ServerView:
        moving = i % 17 == 5
        return ServerView(
            peer_id=peer,
            name=self.names[peer],
            model=name,
            start=start,
            end=end,
            state="joining" if i % 11 == 7 else "draining" if i % 23 == 9 else "serving",
            queue_depth=self.random.choice((0, 0, 0, 1, 1, 2, 5)),
            free_kv_tokens=self.random.randrange(2_000, 180_000),
            prefill_ms_per_token=self.random.uniform(0.02, 0.6),
            decode_ms_per_block=self.random.uniform(0.7, 4.2),
            tokens_per_s=None if i % 13 == 7 else self.random.uniform(4, 60),
            relayed=i % 4 == 3,
            next_start=0 if moving else None,
            next_end=end - start if moving else None,
            age_s=self.random.uniform(1, 29),
            convicted=self._named(f"signed a wrong proof that it holds model.safetensors of {name}", i)
            if self.num_nodes >= 100 and i % 41 == 13
            else None,
        )

    def _model_view(
        self, name: str, num_blocks: int, servers: Sequence[ServerView], replicas: Sequence[int]
    ) -> ModelView:
        weakest = min(range(num_blocks), key=lambda block: replicas[block])
        least = replicas[weakest]
        missing = [block for block in range(num_blocks) if not replicas[block]]
        words = {
            0: f"Blocks from {weakest} on have no server: it cannot answer until somebody takes them.",
            1: f"It answers, but block {weakest} has a single server: one more would make it safe.",
        }.get(least, f"It answers, and every block has at least {least} servers.")
        return ModelView(
            name=name,
            revision=hashlib.sha256(name.encode()).hexdigest()[:40],
            num_blocks=num_blocks,
            health="incomplete" if not least else "thin" if least == 1 else "whole",
            words=words,
            num_servers=len(servers),
            missing=((missing[0], missing[-1] + 1),) if missing else (),
            weakest_block=weakest,
            weakest_replicas=least,
            tokens_per_s=sum(server.tokens_per_s or 0 for server in servers) / 3,
            other_revisions=(
                (RevisionView(revision=self._named("0badc0de" * 5, 0), num_servers=2, is_whole=False),)
                if self.hostile or self.num_nodes >= 100
                else ()
            ),
            manifest=hashlib.sha256(f"manifest of {name}".encode()).hexdigest() if name == "story" else None,
            publisher=peer_id(0) if name == "story" else None,
        )

    def _chains(self, servers: Sequence[ServerView], num_blocks: int) -> list[ChainView]:
        chains: list[ChainView] = []
        left = [server for server in servers if server.state == "serving" and server.convicted is None]
        while len(chains) < 3:
            spans: list[SpanView] = []
            cost_ms = 0.0
            at = 0
            while at < num_blocks:
                fit = [one for one in left if one.start <= at < one.end]
                if not fit:
                    return chains
                best = max(fit, key=lambda one: one.end)
                left.remove(best)
                spans.append(SpanView(peer_id=best.peer_id, name=best.name, start=at, end=best.end))
                cost_ms += (best.end - at) * best.decode_ms_per_block + 9
                at = best.end
            chains.append(ChainView(spans=tuple(spans), ms_per_token=cost_ms))
        return chains

    # --- runs -----------------------------------------------------------------------------------------------------

    def _run(self, run: str, number: int) -> RunDetail:
        members = [peer for i, peer in enumerate(self.workers) if i % 3 == 2 or self.num_nodes < 100]
        members = members[-5:] if self.num_nodes < 100 else members[number::2]
        newest, planned = (118, 300) if number == 0 else (500, 4_000)
        steps = [self._step(step, newest, members) for step in range(max(1, newest - 499), newest + 1)]
        contributors = [self._contributor(run, peer, i, newest) for i, peer in enumerate(members)]
        contributors.sort(key=lambda one: -one.tokens)
        name = self._named("stories-110m" if number == 0 else "multilingual-1b", number)
        view = RunView(
            run=run,
            name=name,
            signed_by="ed25519:" + hashlib.sha256(b"author").hexdigest()[:16],
            state="training",
            words=f"{len(members)} members train together; outer step {newest} of {planned} is committed.",
            outer_step=newest,
            outer_steps=planned,
            loss=steps[-1].loss,
            losses=tuple(step.loss for step in steps[-60:]),
            num_members=len(members),
            num_agreeing=len(members) - (number > 0),
            num_at_step=len(members),
            digest=steps[-1].digest,
            tokens_per_s=sum(one.tokens_per_s or 0 for one in contributors),
            projected_end=self.at + (planned - newest) * 211,
            endorsed_step=MAX_OUTER_STEP if self.hostile else 96 if number == 0 else 0,
            num_on_probation=len(members) if self.hostile else 1 - number,
            num_trainers=len(members),
        )
        files = (("model.safetensors", 219_405_696), ("config.json", 713), ("tokenizer.json", 2_114_924))
        url = f"/checkpoints/{run}/"
        return RunDetail(
            run=view,
            num_parameters=109_700_000 if number == 0 else 1_050_000_000,
            steps=tuple(steps),
            refusals=self._refusals(members, newest),
            bans=self._bans(members, newest),
            contributors=tuple(contributors),
            checkpoint=tuple(CheckpointFile(name=file, num_bytes=size, url=url + file) for file, size in files),
        )

    def _step(self, step: int, newest: int, members: Sequence[str]) -> StepView:
        told = step != newest - 2
        wobble = self.random.uniform
        return StepView(
            outer_step=step,
            at=self.at - (newest - step) * 211 - 40,
            loss=2.05 + 4.6 * math.exp(-step / 34) + wobble(-0.035, 0.035),
            digest=hashlib.sha256(f"step {step}".encode()).hexdigest()[:16],
            num_members=len(members[: max(1, len(members) - (step % 9 == 0))][:64]),
            num_tokens=len(members) * 131_072,
            seconds=211 * wobble(0.95, 1.06),
            phases_s={name: value * wobble(0.9, 1.15) for name, value in PHASES_S.items()} if told else {},
            bytes_per_parameter=wobble(1.02, 1.09) if told else None,
            validation_loss=None if step % 10 else 2.1 + 4.6 * math.exp(-step / 34),
        )

    def _contributor(self, run: str, peer: str, i: int, newest: int) -> ContributorView:
        rounds = max(1, newest - self.random.randrange(0, 90))
        one = ContributorView(
            peer_id=peer,
            name=self.names[peer],
            run=run,
            state="leaving" if i % 41 == 40 else "joining" if i % 29 == 28 else "training",
            outer_step=newest,
            tokens_per_s=self.random.uniform(500, 4_200),
            tokens=rounds * 131_072,
            rounds=rounds,
            uptime_s=rounds * 211.0,
            held_out_score=(i % 7 - 1) / 40 if i % 5 else None,
        )
        self.training.setdefault(peer, []).append(one)
        return one

    def _bans(self, members: Sequence[str], newest: int) -> tuple[BanView, ...]:
        return tuple(
            BanView(
                peer_id=peer,
                name=self.names[peer],
                outer_step=max(1, newest - 7 * index),
                kind="wrong_reduction",
                reason=f"it signed a wrong result of part {index} of outer step {max(1, newest - 7 * index)}",
                until=None if index else newest + 40,
            )
            for index, peer in enumerate(members[2:4])
        )

    def _refusals(self, members: Sequence[str], newest: int) -> tuple[RefusalView, ...]:
        reasons = (
            "the norm of its pseudo-gradient is 41 times the group's median",
            "its part came 12.4 s after the deadline of the reduce",
            "its pseudo-gradient has values that are no numbers",
        )
        if len(members) < 2:
            return ()
        return tuple(
            RefusalView(
                outer_step=newest - 7 * i - 1,
                at=self.at - (7 * i + 1) * 211,
                peer_id=members[(i + 1) % len(members)],
                name=self.names[members[(i + 1) % len(members)]],
                by_peer_id=members[0],
                reason=self._named(reason, i),
            )
            for i, reason in enumerate(reasons)
        )

    # --- nodes ----------------------------------------------------------------------------------------------------

    def _node(self, number: int, peer: str) -> NodeDetail:
        device, gib, decode = DEVICES[number % len(DEVICES)]
        serving = self.serving.get(peer, [])
        training = self.training.get(peer, [])
        up_s = self.random.uniform(0.2, 12) * DAY_S
        fresh = self.random.uniform(1, 28)
        view = NodeView(
            peer_id=peer,
            name=self.names[peer],
            version="0.1.0" if not self.hostile else self._named("", number),
            protocol_version=7,
            device=device if not self.hostile else self._named("", number + 1),
            state="leaving" if number % 37 == 5 and number > 9 else "alive",
            reachability="relay" if number % 4 == 3 else "unknown" if number % 50 == 9 else "public",
            memory_bytes=gib * 2**30,
            free_memory_bytes=int(gib * 2**30 * self.random.uniform(0.1, 0.7)),
            prefill_tokens_per_s=decode * 31,
            decode_tokens_per_s=decode,
            training_tokens_per_s=None if number % 5 == 4 else decode * 77,
            started_at=self.at - up_s,
            age_s=fresh,
            models=tuple(server.model for server in serving),
            runs=tuple(one.run for one in training),
            role=("seed", "gateway")[number] if number < 2 else "volunteer",
            paths=None if number % 11 == 7 else PathCounts(direct=number % 40, punched=number % 6, relayed=1).by_kind(),
            from_here=_from_here(number),
        )
        gaps = [self.random.uniform(0.1, 0.9) * DAY_S for _ in range(3)]
        presence = (
            PresenceView(since=self.at - up_s - gaps[0] - 6 * DAY_S, until=self.at - up_s - gaps[0]),
            PresenceView(since=self.at - up_s, until=None),
        )
        return NodeDetail(
            node=view,
            presence=presence,
            uptime_share=(6 * DAY_S + up_s) / (6 * DAY_S + up_s + gaps[0]),
            tokens_trained=sum(one.tokens for one in training),
            rounds=sum(one.rounds for one in training),
            serving=tuple(serving),
            training=tuple(training),
        )

    # --- the whole ------------------------------------------------------------------------------------------------

    def _overview(
        self, models: dict[str, ModelDetail], runs: dict[str, RunDetail], nodes: dict[str, NodeDetail]
    ) -> Overview:
        states: dict[str, int] = {}
        ways: dict[str, int] = {}
        for detail in nodes.values():
            states[detail.node.state] = states.get(detail.node.state, 0) + 1
            ways[detail.node.reachability] = ways.get(detail.node.reachability, 0) + 1
        return Overview(
            at=self.at,
            stale=None,
            network_id="a-swarm-of-friends" if not self.hostile else HOSTILE_NAMES[0],
            version="0.1.0",
            num_nodes=len(nodes),
            num_volunteers=len(self.workers),
            nodes_by_state=states,
            nodes_by_reachability=ways,
            paths=counted_paths(detail.node for detail in nodes.values()),
            models=tuple(detail.model for detail in models.values()),
            runs=tuple(detail.run for detail in runs.values()),
            tokens_per_s=sum(detail.model.tokens_per_s or 0 for detail in models.values()) if models else None,
            training_tokens_per_s=sum(detail.run.tokens_per_s or 0 for detail in runs.values()) if runs else None,
            first_token_p50_s=0.41 if models else None,
            first_token_p95_s=1.38 if models else None,
            joins_24h=len(nodes) // 3,
            leaves_24h=len(nodes) // 5,
            happenings=tuple(self._happenings()),
            join_command="swarm-node join --peers "
            "/dns4/seed.example.org/tcp/4001/p2p/12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA",
        )

    def _happenings(self) -> list[ChangeEvent]:
        if not self.num_nodes:
            return []
        log: list[ChangeEvent] = []
        for i, peer in enumerate(self.peers[:9]):
            kind = ("join", "run", "join", "leave", "model")[i % 5]
            name = self.names[peer] or peer[-8:]
            words = {
                "join": f"{name} joined",
                "leave": f"{name} left, as it had announced",
                "run": f"{self._named('stories-110m', 0)} committed outer step {118 - i}",
                "model": f"{next(iter(self.models))} is whole: every block has a server",
            }[kind]
            who = peer if kind in {"join", "leave"} else None
            log.append(ChangeEvent(at=self.at - 40 - i * 700, kind=kind, peer_id=who, words=words))
        return log

    def _series(self) -> dict[str, Series]:
        def series(name: str, unit: str, middle: float) -> Series:
            values = [
                None if i == 40 else middle * (1 + 0.2 * math.sin(i / 9) + self.random.uniform(-0.05, 0.05))
                for i in range(96)
            ]
            return Series(name=name, unit=unit, start=self.at - DAY_S, step_s=900, values=tuple(values))

        return {
            "tokens_per_s": series("tokens_per_s", "tokens/s", 60.0),
            "training_tokens_per_s": series("training_tokens_per_s", "tokens/s", 8_300.0),
            "num_nodes": series("num_nodes", "nodes", float(self.num_nodes)),
        }
