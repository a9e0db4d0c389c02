"""What stands in for parts of mlx_lm's modules that do not run here, or not comparably.

Do not run: bitnet and muse_spark call Metal kernels, so elsewhere plain mlx does the same
arithmetic. olmo adds the string "causal" to its scores and can only be imported beside another
package: it gets an additive mask and an empty module of that name.

Not comparably: afm7 rounds keys and values to whole steps of 8 bits, muse_spark rounds to
bfloat16, which makes 1e-2 of a difference of 1e-7; here they don't. phi3small forbids 91 tokens by
number; here its vocabulary is smaller.

What happens to keys and values after that is untouched.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx_lm.models import base


def put_in(name: str) -> None:
    """Make module ``name`` of mlx_lm.models run here."""
    if name == "olmo":
        sys.modules.setdefault("hf_olmo", ModuleType("hf_olmo"))
        importlib.import_module("mlx_lm.models.olmo").create_attention_mask = _additive_mask
    elif name == "afm7":
        importlib.import_module("mlx_lm.models.afm7").fake_8bit_quant = lambda x, scale: x
    elif name == "bitnet" and not mx.metal.is_available():
        layers = importlib.import_module("mlx_lm.models.bitlinear_layers")
        layers.BitLinear.execute_matmul_kernel = _ternary_matmul
    elif name == "muse_spark" and not mx.metal.is_available():
        module = importlib.import_module("mlx_lm.models.muse_spark")
        module.mx = SimpleNamespace(**{**vars(mx), "bfloat16": mx.float32})
        for function in (
            expert_routing,
            norm_add_norm,
            post_expert_norm_combine,
            pre_norm,
            qk_norm,
            qk_norm_rope,
            rms_norm_sigmoid_gate,
        ):
            setattr(module, function.__name__, function)


def allow_all_tokens(model: Any) -> None:
    """phi3small, with a smaller vocabulary than the numbers it forbids."""
    model._dummy_tokenizer_ids = mx.zeros((0,), mx.int32)


def _additive_mask(h: mx.array, cache: Any) -> mx.array | None:
    mask = base.create_attention_mask(h, cache, return_array=True)
    return None if mask is None else mx.where(mask, mx.array(0.0), mx.array(-mx.inf))


def _ternary_matmul(self: Any, x: mx.array, packed: mx.array) -> mx.array:
    rows = mx.concatenate([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], axis=0)
    weight = rows[: self.out_features].astype(x.dtype) - 1
    scale = 1 / self.weight_scale if self.invert_weight_scales else self.weight_scale
    return x @ weight.T * scale


# muse_spark, in the order of its block.


def pre_norm(stream, norm, *, dtype) -> mx.array:
    return mx.fast.rms_norm(stream, norm.weight, norm.eps).astype(dtype)


def qk_norm(qkvg, *, n_heads, n_kv_heads, head_dim, eps, query_scale) -> list[mx.array]:
    heads = qkvg.reshape(*qkvg.shape[:-1], -1, head_dim)
    q = mx.fast.rms_norm(heads[..., :n_heads, :], None, eps) * query_scale
    k = mx.fast.rms_norm(heads[..., n_heads : n_heads + n_kv_heads, :], None, eps)
    return [q, k]


def qk_norm_rope(qkvg, *, rope_base, offset, head_dim, **norm) -> list[mx.array]:
    return [
        mx.fast.rope(
            x.swapaxes(-2, -3), head_dim, traditional=True, base=rope_base, scale=1.0, offset=offset
        ).swapaxes(-2, -3)
        for x in qk_norm(qkvg, head_dim=head_dim, **norm)
    ]


def rms_norm_sigmoid_gate(x, gate, *, eps) -> mx.array:
    batch, _, length, _ = x.shape
    x = mx.fast.rms_norm(x, None, eps).swapaxes(1, 2).reshape(batch, length, -1)
    return x * mx.sigmoid(gate)


def norm_add_norm(branch, stream, *, alpha, beta, post_weight, post_eps, next_norm):
    branch = branch if post_weight is None else branch * post_weight
    stream = alpha * stream + beta * mx.fast.rms_norm(branch, None, post_eps)
    return stream, next_norm and mx.fast.rms_norm(stream, next_norm.weight, next_norm.eps)


def expert_routing(logits, expert_bias, *, top_k, multiplier, score_eps, route_scale):
    scores = mx.sigmoid(logits * multiplier)
    experts = mx.argsort(-(scores + expert_bias), axis=-1)[..., :top_k]
    weights = mx.take_along_axis(scores, experts, axis=-1)
    return [experts, weights / (weights.sum(axis=-1, keepdims=True) + score_eps) * route_scale]


def post_expert_norm_combine(experts, weights, *, norm_weight, eps) -> mx.array:
    normed = mx.fast.rms_norm(experts * norm_weight, None, eps)
    return (normed * weights[..., None]).sum(axis=-2)
