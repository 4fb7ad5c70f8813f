"""The two networks of Trinity and Hierarchical: one groups operators, one schedules groups on devices.

    operators [N, F] ──partition──▶ softmax over G groups ──drawn──▶ groups in program order [L]
    groups: mean word, mean size, which others they touch ──encoder──▶ memory [L, H]
    decoder, group by group: previous device ──two LSTM layers──▶ attention to the memory ──▶ C·tanh(u / T) ──drawn──▶ device

Trinity (Zeng et al., Algorithms 2022, 15(4), 108), sections 4.1.1, 4.1.2 and 5.1; Mirhoseini et al., 2017 and 2018. Sizes are
the published ones. What they leave open, and how it was read here:

* Groups are read in program order of their first operators, and groups without operators not at all: the number that a softmax
  gave a group says nothing.
* Attention is multiplicative (Luong, Pham and Manning, 2015), on top of the decoder: for all steps one product of matrices.
* "One-to-one correspondence" of the sequences: the decoder also reads the memory at its own place.
* Dropout is for learning: partitions are drawn without it.
* Linear clipping: u / T inside tanh, as it is written and as Bello et al., 2016, have it.

Arrays are as long as the largest number of groups; no step is made that no partition has a group for.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from soapjax.search.learned.lstm import HIDDEN, LSTM, LstmState, Weights, lstm_step, lstm_steps

PARTITION = (64, 128)
DROPOUT = 0.3
WORD = 20  # size of a word's vector
CLIP, TEMPERATURE = 5.0, 10.0  # C and T
NEVER = -1e9  # a logit


class Told(NamedTuple):
    """Of N operators, arrays of one size for many problems; what fills them up is not there."""

    word: Array  # int32 [N], below WORDS
    figures: Array  # float32 [N, F]
    size: Array  # float32 [N]: of the results
    seconds: Array  # float32 [N]: of compute
    is_there: Array  # bool [N]
    edges: Array  # int32 [E, 2] between operators; filled up with (0, 0)
    num_devices: Array  # int32 []


class Groups(NamedTuple):
    """Of M partitions: what the schedule network reads. L slots, the first `used` of them with operators."""

    slot: Array  # int32 [M, N]: of every operator
    used: Array  # int32 [M]
    touches: Array  # float32 [M, L, L]: 1 where an operator of one is connected to one of the other


def groups_of(number: Array, told: Told, num_groups: int, num_slots: int) -> Groups:
    """Numbers [M, N] of groups below `num_groups` -> slots in program order of their first operators."""

    def one(number: Array) -> Groups:
        n = len(number)
        # Of a group without operators, and of what only fills the array up, none.
        first = jax.ops.segment_min(jnp.where(told.is_there, jnp.arange(n), n), number, num_groups)
        order = jnp.argsort(first)
        slot = jnp.zeros(num_groups, jnp.int32).at[order].set(jnp.arange(num_groups, dtype=jnp.int32))[number]
        pairs = slot[told.edges]
        touches = jnp.zeros((num_slots, num_slots), jnp.float32).at[pairs[:, 0], pairs[:, 1]].set(1)
        touches = jnp.maximum(touches, touches.T) * (1 - jnp.eye(num_slots))
        return Groups(slot, (first < n).sum(dtype=jnp.int32), touches)

    return jax.vmap(one)(number)


def device_of_groups(device: Array, told: Told, slot: Array, num_slots: int, num_devices: int) -> Array:
    """Where most of each group's work is done if operators are on `device` int32 [N]: int32 [M, L] of slots [M, N]."""
    work = jax.nn.one_hot(device, num_devices) * (told.seconds * told.is_there)[:, None]
    return jax.vmap(lambda s: jax.ops.segment_sum(work, s, num_slots))(slot).argmax(2).astype(jnp.int32)


class Partition(nn.Module):
    """Logits [N, G] of the group of every operator: a layer of 64, dropout, a layer of 128 (section 4.1.1)."""

    num_groups: int

    @nn.compact
    def __call__(self, x: Array, drops: bool) -> Array:
        x = nn.relu(nn.Dense(PARTITION[0])(x))
        x = nn.Dropout(DROPOUT, deterministic=not drops)(x)
        x = nn.relu(nn.Dense(PARTITION[1])(x))
        return nn.Dense(self.num_groups)(x)


class Head(NamedTuple):
    """From states of the decoder to logits of devices."""

    query: Array  # [H, H]
    attended: Array  # [2H, H]
    bias: Array  # [H]
    chosen: Array  # [H, D]


class HeadModule(nn.Module):
    num_devices: int

    @nn.compact
    def __call__(self) -> Head:
        init = nn.initializers.lecun_normal()
        return Head(
            self.param("query", init, (HIDDEN, HIDDEN)), self.param("attended", init, (2 * HIDDEN, HIDDEN)),
            self.param("bias", nn.initializers.zeros, (HIDDEN,)), self.param("chosen", init, (HIDDEN, self.num_devices)),
        )  # fmt: skip


class Ready(NamedTuple):
    """A decoder before its first step."""

    weights: Weights
    head: Head
    offered: Array  # bool [D]
    state: LstmState  # [B, H]
    of_device: Array  # [D + 1, 4H]: what each previous device gives to the first layer
    of_memory: Array  # [L, M, 4H]: what the memory gives
    # Attention: products of the memory with weights are made once, not for every state that attends to it.
    keys: Array  # [M, L, H]
    values: Array  # [M, L, H]


def device_logits(ready: Ready, h: Array, used: Array) -> Array:
    """[M, Q, D] of states [M, Q, H] of the decoder (equation 9)."""
    scores = jnp.einsum("mqh,mlh->mql", h, ready.keys) / jnp.sqrt(float(HIDDEN))
    is_used = jnp.arange(ready.keys.shape[1]) < used[:, None, None]
    attended = jnp.einsum("mql,mlh->mqh", jax.nn.softmax(jnp.where(is_used, scores, NEVER)), ready.values)
    u = jnp.tanh(attended + h @ ready.head.attended[HIDDEN:] + ready.head.bias) @ ready.head.chosen
    return jnp.where(ready.offered, CLIP * jnp.tanh(u / TEMPERATURE), NEVER)


class Policy(nn.Module):
    """Both networks. P placements stand for each of M partitions: B = M × P."""

    num_words: int
    num_groups: int
    num_slots: int
    num_devices: int  # at most

    def setup(self):
        self.words = nn.Embed(self.num_words, WORD)
        self.partition = Partition(self.num_groups)
        self.encoder = LSTM(WORD + 1 + self.num_slots)
        self.decoder = LSTM(2 * HIDDEN)  # the previous device, the memory
        self.devices = nn.Embed(self.num_devices + 1, HIDDEN)  # the last one: none yet
        self.head = HeadModule(self.num_devices)

    def __call__(self, told: Told) -> None:
        """Reads everything once: to make parameters."""
        self.partition_logits(told)
        self.devices(jnp.zeros((), jnp.int32))
        self.encoder(), self.decoder(), self.head()

    def partition_logits(self, told: Told, drops: bool = False) -> Array:
        """[N, G]; `drops` to learn, by the random numbers "dropout"."""
        return self.partition(jnp.concatenate([self.words(told.word), told.figures], axis=1), drops)

    def encode(self, told: Told, groups: Groups) -> tuple[LstmState, Array]:
        """The state after the last group, and the memory [L, M, H]."""
        weight = told.is_there.astype(jnp.float32)
        features = jnp.concatenate([self.words(told.word), told.size[:, None]], axis=1) * weight[:, None]

        def means(slot: Array) -> Array:
            total, count = (jax.ops.segment_sum(x, slot, self.num_slots) for x in (features, weight))
            return total / jnp.maximum(count, 1)[:, None]

        read = jnp.concatenate([jax.vmap(means)(groups.slot), groups.touches], axis=2).swapaxes(0, 1)  # [L, M, F]
        w = self.encoder()
        memory, state = lstm_steps(w, LstmState.zeros(len(groups.used)), read @ w.into, groups.used)
        return state, memory

    def _ready(self, told: Told, groups: Groups, placements: int) -> Ready:
        state, memory = self.encode(told, groups)
        state = jax.tree.map(lambda x: jnp.repeat(x, placements, axis=0), state)
        w = self.decoder()
        of_device, of_memory = self.devices.embedding @ w.into[:HIDDEN], memory @ w.into[HIDDEN:]
        offered = jnp.arange(self.num_devices) < told.num_devices
        head, memory = self.head(), memory.swapaxes(0, 1)
        return Ready(
            weights=w, head=head, offered=offered, state=state, of_device=of_device, of_memory=of_memory,
            keys=memory @ head.query.T, values=memory @ head.attended[:HIDDEN],
        )  # fmt: skip

    def log_probabilities(self, told: Told, groups: Groups, device: Array) -> Array:
        """Of every device, [M, P, L, D], as each placement int [M, P, L] comes to its groups."""
        m, p, slots = device.shape
        ready = self._ready(told, groups, p)
        before = jnp.concatenate([jnp.full((m, p, 1), self.num_devices), device[..., :-1]], axis=2)
        # Not by indices: the gradient of that is a scatter, row by row.
        of_before = jax.nn.one_hot(before.transpose(2, 0, 1), self.num_devices + 1) @ ready.of_device  # [L, M, P, 4H]
        given = (of_before + ready.of_memory[:, :, None]).reshape(slots, m * p, -1)
        h, _ = lstm_steps(ready.weights, ready.state, given, jnp.repeat(groups.used, p))  # [L, B, H]
        h = h.reshape(slots, m, p, HIDDEN).transpose(1, 2, 0, 3).reshape(m, p * slots, HIDDEN)
        return jax.nn.log_softmax(device_logits(ready, h, groups.used)).reshape(m, p, slots, -1)

    def draw(
        self, key: Array, told: Told, groups: Groups, given: Array, is_given: Array, noise: Array
    ) -> tuple[Array, Array]:  # fmt: skip
        """Devices int32 [M, P, L] of all groups, and the logarithm of each choice's probability [M, P, L].

        Where `is_given` bool [P], devices are not drawn but those `given` int32 [M, L]. `noise` [] is the largest that is added to
        logits, uniformly from either side of zero.
        """
        placements = len(is_given)
        m = len(groups.used)
        ready = self._ready(told, groups, placements)

        def step(t, carried):
            state, before, devices, found = carried
            state = lstm_step(ready.weights, state, ready.of_device[before] + jnp.repeat(ready.of_memory[t], placements, axis=0))
            logits = device_logits(ready, state.h[1].reshape(m, placements, HIDDEN), groups.used)
            of_noise, of_choice = jax.random.split(jax.random.fold_in(key, t))
            logits += noise * jax.random.uniform(of_noise, logits.shape, minval=-1, maxval=1)
            device = jax.random.categorical(of_choice, logits).astype(jnp.int32)  # [M, P]
            device = jnp.where(is_given, given[:, t, None], device)
            log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), device[..., None], axis=2)[..., 0]
            return state, device.reshape(-1), devices.at[t].set(device), found.at[t].set(log_p)

        none = jnp.zeros((self.num_slots, m, placements))
        start = ready.state, jnp.full(m * placements, self.num_devices, jnp.int32), none.astype(jnp.int32), none
        _, _, devices, found = jax.lax.fori_loop(0, groups.used.max(), step, start)
        return devices.transpose(1, 2, 0), found.transpose(1, 2, 0)
