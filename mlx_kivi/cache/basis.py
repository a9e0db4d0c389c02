"""The basis that keys and values are packed in: one in which rounding costs least.

Scores q·k stay the same for k' = A k and q' = A⁻ᵀ q, whatever A is. Rounding k' channel by channel
adds an error Σ_c var(k'_c) E[q'_c²] to them, and A decides how large that is. *Hadamard*: every
channel becomes an even mixture of all (QuaRot, arXiv:2404.00456, section 3), so that none has
outliers. *Balanced*: with Sq = E[q qᵀ], Sk the covariance of keys within a group of tokens and
U Λ Uᵀ = Sq^½ Sk Sq^½ by eigenvalues, A = H Λ^-¼ Uᵀ Sq^½ brings the error to its least, (Σ √λ)² / D.
Values have no queries: they are mixed by Hadamard's matrix, undone once on the weighted sum.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from weakref import WeakValueDictionary

import mlx.core as mx
import numpy as np

from ..config import KVCacheConfig

# How far the lowest and highest level lie inside a group's range, in steps: by bits, in a basis
# that mixes channels. Chosen by benchmarks/quality.py (docs/quality.md).
_KEY_INSETS = {2: 3 / 8, 3: 0.25, 4: 1 / 16}
_VALUE_INSETS = {2: 3 / 8, 3: 1 / 8, 4: 1 / 16}


class KeyBasis:
    """Keys as they are: the basis of KIVI, and what the others have in common."""

    mixed = False

    def parts(self, dim: int, bits: int) -> list[tuple[int, int]]:
        """Channels and bits of each part of a head of ``dim`` channels stored in ``bits`` bits."""
        return [(dim, bits)]

    def inset(self, bits: int) -> float:
        """For `quantize`."""
        return 2.0 ** (1 - bits)

    def keys(self, x: mx.array) -> mx.array:
        """Keys [B, H, T, D] in this basis."""
        return x

    def queries(self, x: mx.array, scale: float) -> mx.array:
        """scale times queries [B, H, rows, D] float32, for keys in this basis."""
        return x * everywhere(scale, x.shape)

    def back(self, x: mx.array) -> mx.array:
        """Keys in this basis [B, H, T, D] float32 as they were."""
        return x


PLAIN = KeyBasis()


class Balance:
    """What a layer's keys and queries are like: a property of the model, shared by its caches.

    Args:
        matrix: Λ^-¼ Uᵀ Sq^½ of each KV head, transposed, its columns in falling order of λ:
            [H, D, D], kept in bfloat16.

    Raises:
        ValueError: if it is no such matrix, or can't be inverted in float32.
    """

    def __init__(self, matrix: mx.array) -> None:
        if matrix.ndim != 3 or matrix.shape[1] != matrix.shape[2] or 0 in matrix.shape:
            raise ValueError(f"a basis of shape {matrix.shape}")
        self.matrix = matrix.astype(mx.bfloat16)
        _check_condition(self.matrix)
        self.name = _name(self.matrix)
        self._bases: dict[bool, BalancedBasis] = {}
        first = _known.setdefault(self.name, self)
        # The one that goes by the name lives as long as any that is the same.
        self._first = None if first is self else first

    @classmethod
    def shared(cls, matrix: mx.array) -> Balance:
        """The one of this content that a cache or a model holds, else a new one."""
        return known_balance(_name(matrix.astype(mx.bfloat16))) or cls(matrix)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix, and of what is made of it once a cache packs keys."""
        heads, dim, _ = self.matrix.shape
        return self.matrix.nbytes + 4 * (heads + 1) * dim * dim

    def basis(self, ranked: bool) -> BalancedBasis:
        """For keys that have the same bits in every channel, or more in the first ones."""
        if ranked not in self._bases:
            self._bases[ranked] = BalancedBasis(self.matrix, ranked)
        return self._bases[ranked]


def _check_condition(matrix: mx.array) -> None:
    exact = _float64(matrix)
    if np.isfinite(exact).all():
        try:
            norms = [np.linalg.norm(x, axis=(1, 2)) for x in (exact, np.linalg.inv(exact))]
        except np.linalg.LinAlgError:
            norms = []
        if norms and (norms[0] * norms[1]).max() < 1e5:
            return
    raise ValueError("a basis that can't be undone")


def _float64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32), dtype=np.float64)


def _name(matrix: mx.array) -> str:
    shape = str(matrix.shape).encode()
    data = np.array(matrix.view(mx.uint16)).astype("<u2").tobytes()
    return hashlib.sha256(shape + data).hexdigest()[:32]


_known: WeakValueDictionary[str, Balance] = WeakValueDictionary()


def known_balance(name: str) -> Balance | None:
    """The one of this name that a cache or a model holds now."""
    return _known.get(name)


class BalancedBasis(KeyBasis):
    """Keys in the basis of a `Balance`; channels that have other bits are mixed apart."""

    mixed = True

    def __init__(self, matrix: mx.array, ranked: bool) -> None:
        heads, dim, _ = matrix.shape
        self._ranked = ranked
        self._matrix = matrix[None]
        self._mix = _mixture(heads, dim, ranked)
        # The inverse of matrix @ mix, transposed.
        undo = np.linalg.inv(_float64(matrix) @ _float64(self._mix)[0]).swapaxes(-1, -2)
        self._queries = mx.array(np.ascontiguousarray(undo, dtype=np.float32))[None]
        # Other threads have other streams, and can compute nothing that waits for this one.
        mx.eval(self._matrix, self._queries)

    def parts(self, dim: int, bits: int) -> list[tuple[int, int]]:
        return ranked_parts(dim) if self._ranked else [(dim, bits)]

    def inset(self, bits: int) -> float:
        return _KEY_INSETS.get(bits, 0.0)

    def keys(self, x: mx.array) -> mx.array:
        return x.astype(mx.float32) @ self._matrix.astype(mx.float32) @ self._mix

    def queries(self, x: mx.array, scale: float) -> mx.array:
        return mx.addmm(everywhere(0, x.shape), x, self._queries, alpha=scale)

    def back(self, x: mx.array) -> mx.array:
        return x @ self._queries.swapaxes(-1, -2)


def ranked_parts(dim: int) -> list[tuple[int, int]]:
    """Channels and bits of keys in 3 bits whose channels are ranked: those that scores depend on
    most have 4. With scales of groups of 128 that is 3.0 bits in all."""
    first = dim * 3 // 8
    return [(first, 4), (dim - first, 2)]


def ranks(config: KVCacheConfig, dim: int) -> bool:
    """Whether keys of ``dim`` channels, their balance known, have bits by rank."""
    return config.moves_keys and config.k_bits == 3 and dim >= 8


def key_basis(config: KVCacheConfig, balance: Balance | None) -> KeyBasis:
    """The basis for a policy, of a layer of which ``balance`` is known or not."""
    # Hadamard's matrix alone would spread the turning bias of a few channels over all of them.
    if not config.moves_keys or balance is None:
        return PLAIN
    return balance.basis(ranks(config, balance.matrix.shape[2]))


def value_inset(bits: int, mixed: bool) -> float:
    """For `quantize`, of values."""
    return _VALUE_INSETS.get(bits, 0.0) if mixed else 0.0


@lru_cache(maxsize=64)
def everywhere(value: float, shape: tuple[int, ...]) -> mx.array:
    """One number in a shape, made once: no broadcast in the graph of a step."""
    array = mx.broadcast_to(mx.array(value, mx.float32), shape)
    mx.eval(array)
    return array


@lru_cache(maxsize=16)
def hadamard(heads: int, dim: int) -> mx.array:
    """Hadamard's matrix for each of ``heads`` heads: [1, H, D, D] float32."""
    # One array of the shape of what it is multiplied with: no broadcast in the graph of a step.
    matrix = mx.array(hadamard_matrix(dim).astype(np.float32))
    matrix = mx.broadcast_to(matrix, (1, heads, dim, dim))
    mx.eval(matrix)
    return matrix


@lru_cache(maxsize=16)
def _mixture(heads: int, dim: int, ranked: bool) -> mx.array:
    """The same, in a block for each part of ranked channels."""
    if not ranked:
        return hadamard(heads, dim)
    matrix, start = np.zeros((dim, dim), np.float32), 0
    for size, _ in ranked_parts(dim):
        part = slice(start, start + size)
        matrix[part, part] = hadamard_matrix(size)
        start += size
    whole = mx.broadcast_to(mx.array(matrix), (1, heads, dim, dim))
    mx.eval(whole)
    return whole


@lru_cache(maxsize=16)
def unmix(heads: int, dim: int, padded: int) -> mx.array:
    """Undoes `hadamard` on heads that are padded with something: [1, H, padded, D] float32."""
    matrix = np.zeros((padded, dim), np.float32)
    matrix[:dim] = hadamard_matrix(dim).T
    whole = mx.broadcast_to(mx.array(matrix), (1, heads, padded, dim))
    mx.eval(whole)
    return whole


def hadamard_matrix(dim: int) -> np.ndarray:
    """An orthogonal matrix [D, D] of entries of one size, in equal blocks where D has none."""
    size = max(n for n in range(1, dim + 1) if dim % n == 0 and _has_transform(n))
    signs = np.sign(np.array(mx.hadamard_transform(mx.eye(size)))) if size > 1 else np.eye(1)
    return np.kron(np.eye(dim // size), signs / np.sqrt(size))


def _has_transform(n: int) -> bool:
    # What mlx has: m · 2^k.
    return any(n % m == 0 and (n // m).bit_count() == 1 for m in (1, 12, 20, 28))
