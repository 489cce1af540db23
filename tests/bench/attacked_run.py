"""A run of a small model of which three of ten members lie, in concert and all-knowing: rounds without their messages.

The reduction is the rounds' own: int8 both ways, each leaf aggregated on its own by `PartReducer`. The model predicts
the next of 64 symbols of the standard library's source from the four before it, with one hidden layer; the ten members
train it side by side with AdamW, each on its own samples. With unequal data the samples of each next symbol are dealt
by shares drawn from a Dirichlet distribution of 0.3, so that most members hardly ever see most symbols.

Liars know all honest contributions before they answer, and know that leaves are aggregated on their own: what they
optimise, they optimise for each leaf.

Shapes: M members, H honest ones, N values of the model, F of a leaf, S samples, C symbols of context, E values of an
embedding, U hidden units, V symbols, L liars.
"""

from __future__ import annotations

import functools
import math
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from swarm.training.allreduce.part_reduction import PartReducer
from swarm.training.allreduce.parts import ReductionScheme, leaf_values
from swarm.training.member.held_out_effects import effect_of
from swarm.training.standing.held_out_scores import HeldOutRule, HeldOutScores
from swarm.trust.kernels import Floats
from swarm.trust.mixing import DEFAULT_LIAR_SHARE, get_mixing, leaf_beacon
from swarm.trust.standard_aggregators import get_aggregator
from swarm_compression import get_codec
from swarm_protocol import limits
from swarm_protocol.identity import Identity
from swarm_protocol.training_messages import Contribution, Group

Whole = NDArray[np.int64]

NUM_MEMBERS, NUM_LIARS = 10, 3
NUM_HONEST = NUM_MEMBERS - NUM_LIARS
OUTER_STEPS, INTERVAL_STEPS, BATCH = 20, 16, 128
LEARNING_RATE, BETA1, BETA2 = 1e-2, 0.9, 0.95
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.6
"""The defaults of runs."""
DIRICHLET = 0.3

SYMBOLS, CONTEXT, EMBEDDING, HIDDEN = 64, 4, 8, 32
SHAPES = ((SYMBOLS, EMBEDDING), (CONTEXT * EMBEDDING, HIDDEN), (HIDDEN,), (HIDDEN, SYMBOLS), (SYMBOLS,))
NUM_VALUES = sum(math.prod(shape) for shape in SHAPES)
NUM_SAMPLES, NUM_HELD_OUT = 56_000, 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How contributions are put together. `from_last`: CenteredClip that starts at the exponential mean of the last
    results, which the outer momentum is, and takes one step (Karimireddy et al. 2021, algorithm 2); runs do not have
    it, since evidence could not show the start. `discounts`: two contributions of each round are measured on held-out
    samples by all others, and those with a low score count for a tenth."""

    name: str
    aggregator: str = "centered_clip"
    mixing: str = "none"
    liar_share: float = DEFAULT_LIAR_SHARE
    reach: float = 1.2
    momentum: float = 0.0
    from_last: bool = False
    discounts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    rule: Rule
    attack: str
    unequal: bool
    seed: int


# --- the data and the model ---


@functools.cache
def _samples() -> tuple[Whole, Whole]:
    """Contexts [S, C] and next symbols [S]: the 63 most frequent bytes, and one symbol for all others."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = np.frombuffer(b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:60])[:600_000], np.uint8)
    frequent = np.argsort(-np.bincount(text, minlength=256), kind="stable")[: SYMBOLS - 1]
    symbol_of = np.full(256, SYMBOLS - 1)
    symbol_of[frequent] = np.arange(SYMBOLS - 1)
    windows = np.lib.stride_tricks.sliding_window_view(symbol_of[text], CONTEXT + 1)
    chosen = windows[np.random.default_rng(0).permutation(len(windows))[: NUM_SAMPLES + NUM_HELD_OUT]]
    return chosen[:, :CONTEXT], chosen[:, CONTEXT]


def _dealt(y_S: Whole, generator: np.random.Generator, *, unequal: bool) -> list[Whole]:
    """Return the indices of each member's samples."""
    if not unequal:
        return np.array_split(generator.permutation(len(y_S)), NUM_MEMBERS)
    own: list[list[Whole]] = [[] for _ in range(NUM_MEMBERS)]
    for symbol in range(SYMBOLS):
        indices = generator.permutation(np.flatnonzero(y_S == symbol))
        shares = generator.dirichlet([DIRICHLET] * NUM_MEMBERS)
        cuts = (np.cumsum(shares)[:-1] * len(indices)).astype(int)
        for member, piece in enumerate(np.split(indices, cuts)):
            own[member].append(piece)
    return [np.concatenate(pieces) for pieces in own]


def _layers(theta_MN: Floats) -> list[Floats]:
    layers, start = [], 0
    for shape in SHAPES:
        stop = start + math.prod(shape)
        layers.append(theta_MN[:, start:stop].reshape(len(theta_MN), *shape))
        start = stop
    return layers


def _gradient(theta_MN: Floats, x_MSC: Whole, y_MS: Whole) -> Floats:
    embed_MVE, w_in_MEU, b_in_MU, w_out_MUV, b_out_MV = _layers(theta_MN)
    num_models, size = y_MS.shape
    rows = np.arange(num_models)[:, None]
    symbols = x_MSC.reshape(num_models, -1)
    e_MSE = embed_MVE[rows, symbols].reshape(num_models, size, -1)
    h_MSU = np.tanh(e_MSE @ w_in_MEU + b_in_MU[:, None])
    p_MSV = _probabilities(h_MSU @ w_out_MUV + b_out_MV[:, None])
    p_MSV[rows, np.arange(size)[None], y_MS] -= 1
    p_MSV /= size
    back_MSU = (p_MSV @ w_out_MUV.transpose(0, 2, 1)) * (1 - h_MSU * h_MSU)
    back_MSE = (back_MSU @ w_in_MEU.transpose(0, 2, 1)).reshape(num_models, -1, EMBEDDING)
    hot_MSV = np.eye(SYMBOLS, dtype=np.float32)[symbols]
    gradients = (
        hot_MSV.transpose(0, 2, 1) @ back_MSE,
        e_MSE.transpose(0, 2, 1) @ back_MSU,
        back_MSU.sum(axis=1),
        h_MSU.transpose(0, 2, 1) @ p_MSV,
        p_MSV.sum(axis=1),
    )
    return np.concatenate([each.reshape(num_models, -1) for each in gradients], axis=1)


def _probabilities(logits: Floats) -> Floats:
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    result: Floats = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return result


def _held_out_loss(theta_N: Floats, chosen_S: Whole | slice = slice(None)) -> float:
    x_SC, y_S = (each[NUM_SAMPLES:][chosen_S] for each in _samples())
    (embed_VE,), (w_in_EU,), (b_in_U,), (w_out_UV,), (b_out_V,) = _layers(theta_N[None])
    h_SU = np.tanh(embed_VE[x_SC].reshape(len(y_S), -1) @ w_in_EU + b_in_U)
    p_SV = _probabilities((h_SU @ w_out_UV + b_out_V).astype(np.float64))
    return float(-np.log(np.maximum(p_SV[np.arange(len(y_S)), y_S], 1e-300)).mean())


# --- what liars send: [L, N], or [N] for all, from the honest contributions [H, N] ---


@dataclass(slots=True)
class Liars:
    """What a coalition of liars knows and remembers. `own_LN` is what they would contribute if they were honest."""

    generator: np.random.Generator
    own_LN: Floats = field(default_factory=lambda: np.zeros((NUM_LIARS, NUM_VALUES), np.float32))
    direction_N: Floats = field(init=False)
    axis_N: Floats = field(init=False)
    scores_H: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        direction_N = self.generator.standard_normal(NUM_VALUES).astype(np.float32)
        self.direction_N = self.axis_N = direction_N / np.linalg.norm(direction_N)
        self.scores_H = np.zeros(NUM_HONEST)


def _times(factor: float) -> Callable[[Floats, Liars], Floats]:
    return lambda x_HN, _: np.float32(factor) * x_HN.mean(axis=0)


def _noise(x_HN: Floats, liars: Liars) -> Floats:
    """Return one random direction for all rounds, as long as an honest contribution. Louder liars would be found out,
    and changing noise would cancel out."""
    return liars.direction_N * np.linalg.norm(x_HN, axis=1).mean()


def _little(x_HN: Floats, _: Liars) -> Floats:
    """Deviate a little against the sign of each coordinate's mean (Baruch et al. 2019, arXiv 1902.06156)."""
    mean_N = x_HN.mean(axis=0)
    return mean_N - 1.5 * x_HN.std(axis=0) * np.sign(mean_N)


def _mimic(x_HN: Floats, liars: Liars) -> Floats:
    """Copy the honest member that is farthest along the axis of the greatest variance (Karimireddy et al. 2022, arXiv
    2006.09365, appendix B)."""
    away_HN = x_HN - x_HN.mean(axis=0)
    axis_N = away_HN.T @ (away_HN @ liars.axis_N)
    liars.axis_N = axis_N / max(float(np.linalg.norm(axis_N)), 1e-30)
    liars.scores_H += x_HN @ liars.axis_N
    return x_HN[int(np.argmax(np.abs(liars.scores_H)))]


def _hidden(total: Callable[[NDArray[np.float64]], float]) -> Callable[[Floats, Liars], Floats]:
    """Go as far against the mean as the honest members are from each other, by min-max or min-sum (Shejwalkar and
    Houmansadr 2021, section 4), for each leaf."""

    def leaf(x_HF: Floats) -> Floats:
        mean_F = x_HF.mean(axis=0)
        against_F = -mean_F / max(float(np.linalg.norm(mean_F)), 1e-30)
        squares_HH = ((x_HF[:, None] - x_HF[None]) ** 2).sum(axis=-1)
        most = max(total(row) for row in squares_HH)
        low, high = 0.0, 10 * math.sqrt(squares_HH.max()) + 1e-12
        for _ in range(30):
            middle = (low + high) / 2
            is_hidden = total(((mean_F + middle * against_F - x_HF) ** 2).sum(axis=-1)) <= most
            low, high = (middle, high) if is_hidden else (low, middle)
        return mean_F + low * against_F

    def attack(x_HN: Floats, _: Liars) -> Floats:
        size = leaf_values(NUM_VALUES)
        return np.concatenate([leaf(x_HN[:, start : start + size]) for start in range(0, NUM_VALUES, size)])

    return attack


NO_ATTACK, LABEL_FLIP = "no attack", "label flip"
ATTACKS: Mapping[str, Callable[[Floats, Liars], Floats] | None] = {
    NO_ATTACK: None,
    "flip x10": lambda _, liars: -10 * liars.own_LN,
    "noise": _noise,
    LABEL_FLIP: None,
    "ALIE": _little,
    "inner product 0.5": _times(-0.5),
    "inner product 10": _times(-10),
    "mimic": _mimic,
    "min-max": _hidden(lambda squares: float(squares.max())),
    "min-sum": _hidden(lambda squares: float(squares.sum())),
}
"""Liars that flip labels train honestly on wrong labels. The flip turns round what each liar has learned. Inner
product: Xie et al. 2019, arXiv 1903.03936."""


ABSENT = "absent"
"""In place of an attack: the liars contribute nothing, which is what is left when they are banned from the first round
on."""


# --- the run ---


class AttackedRun:
    """Run one trial."""

    def __init__(self, trial: Trial) -> None:
        rule = trial.rule
        self._trial = trial
        self._generator = np.random.default_rng(trial.seed)
        x_SC, y_S = _samples()
        self._x_SC, self._y_S = x_SC[:NUM_SAMPLES], y_S[:NUM_SAMPLES]
        self._own = _dealt(self._y_S, self._generator, unequal=trial.unequal)
        self._theta_N = (0.1 * self._generator.standard_normal(NUM_VALUES)).astype(np.float32)
        self._momentum_N = np.zeros(NUM_VALUES, np.float32)
        self._generator_of_scores = np.random.default_rng(trial.seed + 11)
        self._moments = [np.zeros((NUM_MEMBERS, NUM_VALUES), np.float32) for _ in range(2)]
        self._averages_MN = np.zeros((NUM_MEMBERS, NUM_VALUES), np.float32)
        self._num_inner = 0
        self._liars = Liars(np.random.default_rng(trial.seed + 7))
        self._codec = get_codec("int8")
        mixing = get_mixing(rule.mixing, liar_share=rule.liar_share, reach=rule.reach)
        self._scheme = ReductionScheme(codec=self._codec, aggregator=get_aggregator(rule.aggregator, {}, mixing))
        self._members = [
            Contribution(peer_id=Identity(bytes([index]) * 32).peer_id, num_tokens=BATCH, num_samples=1)
            for index in range(NUM_MEMBERS)
        ]
        self._scores = HeldOutScores(rule=HeldOutRule(num_drawn=2, discounts=True)) if rule.discounts else None

    def train(self) -> float:
        """Return the held-out loss after the last outer step, in nats a symbol."""
        for step in range(OUTER_STEPS):
            delta_MN = self._attacked(self._contributions(step))
            result_N = self._from_last(delta_MN) if self._trial.rule.from_last else self._reduced(delta_MN, step)
            if self._scores is not None:
                self._score(delta_MN, step)
            result_N = self._over_the_wire(result_N)
            self._momentum_N = OUTER_MOMENTUM * self._momentum_N + result_N
            self._theta_N = self._theta_N - OUTER_RATE * (result_N + OUTER_MOMENTUM * self._momentum_N)
        loss = _held_out_loss(self._theta_N)
        return loss if math.isfinite(loss) else math.inf

    def _contributions(self, step: int) -> Floats:
        theta_MN = np.repeat(self._theta_N[None], NUM_MEMBERS, axis=0)
        first_MN, second_MN = self._moments
        for _ in range(INTERVAL_STEPS):
            chosen = np.stack([own[self._generator.integers(len(own), size=BATCH)] for own in self._own])
            y_MS = self._y_S[chosen]
            if self._trial.attack == LABEL_FLIP:
                y_MS[NUM_HONEST:] = SYMBOLS - 1 - y_MS[NUM_HONEST:]
            gradient_MN = _gradient(theta_MN, self._x_SC[chosen], y_MS)
            self._num_inner += 1
            first_MN += (1 - BETA1) * (gradient_MN - first_MN)
            second_MN += (1 - BETA2) * (gradient_MN * gradient_MN - second_MN)
            root_MN = np.sqrt(second_MN / (1 - BETA2**self._num_inner)) + 1e-8
            theta_MN -= LEARNING_RATE / (1 - BETA1**self._num_inner) * first_MN / root_MN
        delta_MN: Floats = self._theta_N - theta_MN
        if not (momentum := self._trial.rule.momentum):
            return delta_MN
        self._averages_MN = momentum * self._averages_MN + (1 - momentum) * delta_MN
        return self._averages_MN / np.float32(1 - momentum ** (step + 1))

    def _attacked(self, delta_MN: Floats) -> Floats:
        if self._trial.attack == ABSENT:
            return delta_MN[:NUM_HONEST]
        attack = ATTACKS[self._trial.attack]
        if attack is not None:
            delta_MN, self._liars.own_LN = delta_MN.copy(), delta_MN[NUM_HONEST:]
            delta_MN[NUM_HONEST:] = attack(delta_MN[:NUM_HONEST], self._liars)
        return delta_MN

    def _reduced(self, delta_MN: Floats, step: int) -> Floats:
        encoded = [self._codec.encode(torch.from_numpy(delta_N)) for delta_N in delta_MN]
        beacon = functools.partial(leaf_beacon, "bench", step, bytes([self._trial.seed]) * 32)
        reducer = PartReducer(self._scheme, self._members[: len(delta_MN)], leaf_values(NUM_VALUES), beacon)
        return reducer.combined(encoded, slice(0, NUM_VALUES)).numpy()

    def _score(self, delta_MN: Floats, step: int) -> None:
        """Measure drawn contributions: each honest member what its own tenth of one does on 512 held-out samples of its
        own draw; liars say the best of each other and the worst of all others."""
        assert self._scores is not None
        peers = [each.peer_id for each in self._members]
        group = Group(
            run="bench",
            step=step + 1,
            attempt=0,
            state_digest=bytes(32),
            members=tuple(sorted(self._members, key=lambda each: each.peer_id)),
            part_values=(NUM_VALUES // NUM_MEMBERS,) * NUM_MEMBERS,
            reduce_s=1.0,
            vote_s=1.0,
        )
        drawn = self._scores.rule.draw(group, (delta_MN.tobytes()[:64],))
        effects = dict[str, tuple[int, ...]]()
        for index, peer in enumerate(peers):
            if index >= NUM_HONEST:
                sides = (1 if peers.index(subject) >= NUM_HONEST else -1 for subject in drawn)
                effects[peer] = tuple(side * limits.MAX_EFFECT for side in sides)
                continue
            place, chosen_S = slice(index * NUM_VALUES // 10, (index + 1) * NUM_VALUES // 10), self._chosen()
            before, found = _held_out_loss(self._theta_N, chosen_S), []
            for subject in drawn:
                moved_N = self._theta_N.copy()
                moved_N[place] -= OUTER_RATE * self._over_the_wire(delta_MN[peers.index(subject)])[place]
                found.append(effect_of(before - _held_out_loss(moved_N, chosen_S), NUM_MEMBERS))
            effects[peer] = tuple(found)
        members = tuple(replace(each, effects=effects[each.peer_id]) for each in group.members)
        scores = replace(self._scores, drawn=drawn).after(peers, replace(group, members=members))
        self._scores = replace(self._scores, scores=scores)
        self._members = [replace(each, discounted=self._scores.is_discounted(each.peer_id)) for each in self._members]

    def _chosen(self) -> Whole:
        return self._generator_of_scores.integers(NUM_HELD_OUT, size=512)

    def _from_last(self, delta_MN: Floats) -> Floats:
        start_N = (1 - OUTER_MOMENTUM) * self._momentum_N
        size, leaves = leaf_values(NUM_VALUES), []
        for first in range(0, NUM_VALUES, size):
            start_F = start_N[first : first + size]
            away_MF = np.stack([self._over_the_wire(x_N[first : first + size]) for x_N in delta_MN]) - start_F
            length_M = np.linalg.norm(away_MF, axis=1)
            limit = np.sort(length_M)[(NUM_MEMBERS - 1) // 2]
            kept_M = np.minimum(1, limit / np.maximum(length_M, 1e-30))
            leaves.append(start_F + (kept_M[:, None] * away_MF).mean(axis=0))
        return np.concatenate(leaves).astype(np.float32)

    def _over_the_wire(self, x_F: Floats) -> Floats:
        x = torch.from_numpy(np.ascontiguousarray(x_F, dtype=np.float32))
        return self._codec.decode(self._codec.encode(x), x.numel()).numpy()


def losses(trials: Sequence[Trial]) -> list[float]:
    """Return the final losses of trials, computed on one thread."""
    torch.set_num_threads(1)
    return [AttackedRun(trial).train() for trial in trials]
