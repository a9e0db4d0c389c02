"""What storage may do to tokens: the bases that they are packed in, and half a step there."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np

from mlx_kivi import KVCacheConfig
from mlx_kivi.cache.basis import Balance
from mlx_kivi.config import value_group


def mixing(dim: int) -> np.ndarray:
    """Hadamard's matrix [D, D]: Sylvester's, or mlx's own, in blocks where D has none."""
    orders = {m << k for m in (1, 12, 20, 28) for k in range(9)}
    size = max(n for n in orders if dim % n == 0)
    if size & (size - 1):
        signs = np.array(mx.hadamard_transform(mx.eye(size), scale=1.0))
    else:
        signs = np.ones((1, 1))
        while len(signs) < size:
            signs = np.kron([[1, 1], [1, -1]], signs)
    return np.kron(np.eye(dim // size), signs / size**0.5)


def ranked_mixing(dim: int) -> np.ndarray:
    """The same for the first three eighths of the channels, and for the others."""
    first = dim * 3 // 8
    matrix = np.zeros((dim, dim))
    matrix[:first, :first], matrix[first:, first:] = mixing(first), mixing(dim - first)
    return matrix


@lru_cache(maxsize=64)
def random_balance(heads: int, dim: int, seed: int) -> Balance:
    """As uneven as those of real models: of condition 6, its columns the size of a rotation's."""
    rng = np.random.RandomState(seed)
    turns = [np.linalg.qr(rng.randn(heads, dim, dim))[0] for _ in range(2)]
    matrix = turns[0] * np.geomspace(6, 1, dim) @ turns[1]
    matrix /= np.sqrt((matrix**2).sum(axis=1, keepdims=True).mean(axis=2, keepdims=True))
    return Balance(mx.array(matrix.astype(np.float32)))


def basis_of(
    config: KVCacheConfig, which: int, heads: int, dim: int, balance: Balance | None
) -> tuple[np.ndarray, np.ndarray]:
    """What keys (``which`` 0) or values are multiplied with to be packed, [H, D, D], and the
    levels of each channel there, [D]."""
    bits = (config.k_bits, config.v_bits)[which] or 8
    levels = np.full(dim, 2.0**bits - 1)
    if bits == 8 or not config.balanced or (which == 0 and balance is None):
        return np.broadcast_to(np.eye(dim), (heads, dim, dim)), levels
    if which == 1:
        return np.broadcast_to(mixing(dim), (heads, dim, dim)), levels
    assert balance is not None
    mix = mixing(dim)
    if bits == 3:
        mix, first = ranked_mixing(dim), dim * 3 // 8
        levels = np.repeat([15.0, 3.0], [first, dim - first])
    return np.array(balance.matrix.astype(mx.float32)).astype(np.float64) @ mix, levels


def half_step(
    config: KVCacheConfig, which: int, x: np.ndarray, sink: int, levels: np.ndarray
) -> np.ndarray:
    """Half of the ideal step, range / levels, of the group each token is in: as x.

    x [B, H, T, D], in the basis of the store: keys (``which`` 0) share a step along whole groups
    of tokens from the sinks on, values (1) along the head. 0 where no step is: sinks, and tokens
    of a partial group.
    """
    bits = config.k_bits if which == 0 else config.v_bits
    bound = np.zeros_like(x)
    if bits is None or 0 in x.shape:
        return bound
    group = config.group_size
    if which == 0:
        for lo in range(sink, x.shape[2] - group + 1, group):
            part = x[:, :, lo : lo + group]
            bound[:, :, lo : lo + group] = np.ptp(part, axis=2, keepdims=True)
    else:
        size, _ = value_group(x.shape[3], group, bits)
        end = sink + (max(0, x.shape[2] - sink) // group) * group
        for lo in range(0, x.shape[3], size):
            part = x[:, :, sink:end, lo : lo + size]
            bound[:, :, sink:end, lo : lo + size] = np.ptp(part, axis=3, keepdims=True)
    return bound / levels / 2
