"""A .tinygpt model as an mlx-lm model module.

Tied embeddings, multi-head attention, LayerNorm, exact GELU and learned absolute
positions, with the header's switches: mixture of experts (Switch Transformer,
arXiv:2101.03961, and Mixtral, arXiv:2401.04088), mixture of depths (arXiv:2404.02258),
differential attention (arXiv:2410.05258), YOCO (arXiv:2405.05254), DeepNorm
(arXiv:2203.00555), RMSNorm on the embeddings, and a sliding window.

Shapes: B sequences, T tokens, C = dModel, H heads, D = C / H, V = vocabSize.
"""

from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.models.switch_layers import SwitchMLP

from ..models import learned_positions
from .config import ModelArgs, tensors

__all__ = ["Model", "ModelArgs", "file_tensors"]

KeysValues = tuple[Any, Any]  # as a cache's update_and_fetch returns them


def _split_heads(x: mx.array, heads: int) -> mx.array:
    B, T, C = x.shape
    return x.reshape(B, T, heads, C // heads).transpose(0, 2, 1, 3)  # [B, H, T, D]


def _join_heads(x: mx.array) -> mx.array:
    B, H, T, D = x.shape
    return x.transpose(0, 2, 1, 3).reshape(B, T, H * D)


class Attention(nn.Module):
    """Causal multi-head attention; returns its keys and values beside the output."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.heads = args.heads
        self.scale = (args.dModel // args.heads) ** -0.5
        self.q_proj = nn.Linear(args.dModel, args.dModel)
        self.k_proj = nn.Linear(args.dModel, args.dModel)
        self.v_proj = nn.Linear(args.dModel, args.dModel)
        self.o_proj = nn.Linear(args.dModel, args.dModel)

    def __call__(
        self, x: mx.array, mask: Any, cache: Any, shared: KeysValues | None
    ) -> tuple[mx.array, KeysValues]:
        queries, keys, values = (
            _split_heads(proj(x), self.heads) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        out = scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self.scale, mask=mask
        )
        return self.o_proj(_join_heads(out)), (keys, values)


class CrossAttention(nn.Module):
    """YOCO's attention after the anchor: own queries, the anchor's keys and values."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.heads = args.heads
        self.scale = (args.dModel // args.heads) ** -0.5
        self.q_proj = nn.Linear(args.dModel, args.dModel)
        self.o_proj = nn.Linear(args.dModel, args.dModel)

    def __call__(
        self, x: mx.array, mask: Any, cache: Any, shared: KeysValues | None
    ) -> tuple[mx.array, KeysValues]:
        assert shared is not None
        queries = _split_heads(self.q_proj(x), self.heads)
        out = scaled_dot_product_attention(
            queries, *shared, cache=cache, scale=self.scale, mask=mask
        )
        return self.o_proj(_join_heads(out)), shared


class DifferentialAttention(nn.Module):
    """softmax(q1 k1) v - lambda softmax(q2 k2) v (arXiv:2410.05258, with a plain lambda).

    One cache layer holds both keys side by side, [B, H, T, 2D], and v once. A query with zeros
    in the other key's half meets only its own, exactly. So any kind of cache works, and it
    holds three arrays, not the four of two caches.
    """

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.heads = args.heads
        self.scale = (args.dModel // args.heads) ** -0.5
        for name in ("q1_proj", "k1_proj", "q2_proj", "k2_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(args.dModel, args.dModel))
        setattr(self, "lambda", mx.array(0.0))

    def __call__(
        self, x: mx.array, mask: Any, cache: Any, shared: KeysValues | None
    ) -> tuple[mx.array, KeysValues]:
        q1, k1, q2, k2, values = (
            _split_heads(proj(x), self.heads)
            for proj in (self.q1_proj, self.k1_proj, self.q2_proj, self.k2_proj, self.v_proj)
        )
        keys = mx.concatenate([k1, k2], axis=-1)
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        zeros = mx.zeros_like(q1)
        out1, out2 = (
            scaled_dot_product_attention(
                mx.concatenate(halves, axis=-1),
                keys,
                values,
                cache=cache,
                scale=self.scale,
                mask=mask,
            )
            for halves in ([q1, zeros], [zeros, q2])
        )
        out = out1 - self["lambda"] * out2
        return self.o_proj(_join_heads(out)), (keys, values)


class MLP(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.fc_in = nn.Linear(args.dModel, args.dMlp)
        self.fc_out = nn.Linear(args.dMlp, args.dModel)

    def __call__(self, x: mx.array) -> mx.array:
        return self.fc_out(nn.gelu(self.fc_in(x)))


class MoE(nn.Module):
    """The top k of E expert MLPs; k = 1 keeps the router's probability as the weight."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.k = args.moeTopK
        self.router = nn.Linear(args.dModel, args.nExperts, bias=False)
        self.experts = SwitchMLP(
            args.dModel, args.dMlp, args.nExperts, activation=nn.GELU(), bias=True
        )

    def __call__(self, x: mx.array) -> mx.array:
        probs = mx.softmax(self.router(x), axis=-1, precise=True)  # [B, T, E]
        chosen = mx.argpartition(-probs, kth=self.k - 1, axis=-1)[..., : self.k]
        weights = mx.take_along_axis(probs, chosen, axis=-1)
        if self.k > 1:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return (self.experts(x, chosen) * weights[..., None]).sum(axis=-2)


class Block(nn.Module):
    def __init__(self, args: ModelArgs, index: int):
        super().__init__()
        self.alpha = (2 * args.layers) ** 0.25 if args.useDeepNorm else 1.0
        self.ln1 = nn.LayerNorm(args.dModel, eps=1e-5)
        self.ln2 = nn.LayerNorm(args.dModel, eps=1e-5)
        if index > args.anchor:
            self.cross_attn = CrossAttention(args)
        elif args.useDifferentialAttention:
            self.diff_attn = DifferentialAttention(args)
        else:
            self.attn = Attention(args)
        if args.nExperts > 1:
            self.moe = MoE(args)
        else:
            self.mlp = MLP(args)
        if args.useMoD:
            self.mod_router = nn.Linear(args.dModel, 1)
        self._attention = next(n for n in ("cross_attn", "diff_attn", "attn") if n in self)
        self._feed_forward = "moe" if "moe" in self else "mlp"

    def __call__(
        self, x: mx.array, mask: Any, cache: Any, shared: KeysValues | None
    ) -> tuple[mx.array, KeysValues]:
        out, shared = self[self._attention](self.ln1(x), mask, cache, shared)
        y = self.alpha * x + out
        y = self.alpha * y + self[self._feed_forward](self.ln2(y))
        if "mod_router" in self:
            y = x + mx.sigmoid(self.mod_router(x)) * (y - x)
        return y, shared


class Model(nn.Module):
    """See the module's docstring. `layers` are the blocks; a YOCO model has fewer caches."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.token_embedding = nn.Embedding(args.vocabSize, args.dModel)
        if args.useEmbeddingRMSNorm:
            self.embed_norm = nn.RMSNorm(args.dModel, eps=1e-5)
        self.position_embedding = nn.Embedding(args.ctx, args.dModel)
        self.blocks = [Block(args, i) for i in range(args.layers)]
        self.ln_final = nn.LayerNorm(args.dModel, eps=1e-5)

    def __call__(
        self,
        inputs: mx.array,
        cache: list[Any] | None = None,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        """Logits [B, T, V] for token ids [B, T], or for token embeddings [B, T, C].

        Raises:
            PositionTableFull: a position of ctx or more, unless the caches can restart.
        """
        if input_embeddings is None:
            return learned_positions.forward(self, self._forward, inputs, cache)
        first = cache[0] if cache is not None else None
        spare = learned_positions.check(self, input_embeddings.shape[:2], first)
        return self._forward(inputs, cache, input_embeddings) if spare is None else spare

    def _forward(
        self, inputs: mx.array, cache: list[Any] | None, input_embeddings: mx.array | None = None
    ) -> mx.array:
        x = self.token_embedding(inputs) if input_embeddings is None else input_embeddings
        if "embed_norm" in self:
            x = self.embed_norm(x)
        if cache is None:
            cache = [None] * (self.args.anchor + 1)
        x = x + self._positions(0 if cache[0] is None else cache[0].offset, x.shape[1])
        mask = create_attention_mask(x, cache[0], window_size=self.args.slidingWindow)
        shared = None
        for i, block in enumerate(self.blocks):
            x, shared = block(x, mask, cache[min(i, self.args.anchor)], shared)
        return self.token_embedding.as_linear(self.ln_final(x))

    def _positions(self, offset: int | mx.array, length: int) -> mx.array:
        """Embeddings of positions offset .. offset + length - 1: [T, C].

        A batch cache's offsets are an array [B], below zero for left padding: [B, T, C].
        """
        places = mx.array(offset)[..., None] + mx.arange(length)
        return self.position_embedding(mx.maximum(places, 0))  # padding is masked anyway

    @property
    def layers(self) -> list[Block]:
        return self.blocks

    def make_cache(self) -> list[Any]:
        """One cache a block, up to the anchor in a YOCO model."""
        window = self.args.slidingWindow
        return [
            KVCache() if window is None else RotatingKVCache(max_size=window, keep=0)
            for _ in range(self.args.anchor + 1)
        ]

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """A file's tensors as this module's: experts stacked, unused attention dropped."""
        weights = dict(weights)
        for tensor in tensors(self.args):
            if not tensor.used:
                weights.pop(tensor.name, None)
        for stacked, names in _stacks(self.args):
            if names[0] in weights:
                weights[stacked] = mx.stack([weights.pop(name) for name in names])
        return weights


def file_tensors(args: ModelArgs, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """A module's parameters under the file's names, the reverse of `sanitize`.

    bfloat16, which numpy does not have, becomes float32.
    """
    weights = dict(weights)
    for stacked, names in _stacks(args):
        if stacked in weights:
            weights.update(zip(names, weights.pop(stacked)))
    return {
        name: array.astype(mx.float32) if array.dtype == mx.bfloat16 else array
        for name, array in weights.items()
    }


def _stacks(args: ModelArgs) -> list[tuple[str, list[str]]]:
    """Each stacked expert parameter and the file's names of its slices."""
    if args.nExperts == 1:
        return []
    return [
        (
            f"blocks.{i}.moe.experts.{ours}.{kind}",
            [f"blocks.{i}.moe.experts.{e}.{theirs}.{kind}" for e in range(args.nExperts)],
        )
        for i in range(args.layers)
        for ours, theirs in (("fc1", "fc_in"), ("fc2", "fc_out"))
        for kind in ("weight", "bias")
    ]
