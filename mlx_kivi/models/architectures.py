"""How each model of mlx_lm uses what its cache returns, and what it therefore gets.

A *packed* model hands keys and values straight to mlx_lm's `scaled_dot_product_attention`: it
gets handles. A *dense* one computes on them first: it gets arrays, unpacked at each call from the
same packed storage. Names are modules of `mlx_lm.models`.
"""

from __future__ import annotations

from typing import Any

from mlx_lm.models import cache as mlx_caches

_MLA = "multi-head latent attention expands the cached latent itself"
_OWN = "its attention is written out, not mlx_lm's"

DENSE = {
    "bailing_hybrid": _MLA,
    "bailing_moe_v3": _MLA,
    "deepseek_v3": _MLA,
    "deepseek_v32": _MLA,
    "gemma2": _OWN,
    "glm4_moe_lite": _MLA,
    "glm_moe_dsa": _MLA,
    "kimi_k25": _MLA,
    "kimi_k3": _MLA,
    "kimi_linear": _MLA,
    "kimi_vl": _MLA,
    "longcat_flash": _MLA,
    "longcat_flash_ngram": _MLA,
    "minimax_m3_vl": "its indexer picks blocks from the cached keys",
    "mistral4": _MLA,
    "olmo": _OWN,
    "phi3small": "its block-sparse layers are written out",
    "plamo": "it tiles keys and values first",
    "plamo2": "it calls mx.fast.scaled_dot_product_attention itself",
    "stablelm": "it casts keys and values first",
}

# One token's keys and values are the cached latent itself: a step reads it packed.
LATENT = {name for name, why in DENSE.items() if why == _MLA}

# Models whose CacheList holds, second, the keys of an indexer that chooses what to attend to.
# They are stored in 8 bits at least: a wrong choice costs more than a rounded score.
INDEXED = {"deepseek_v32", "glm_moe_dsa", "minimax_m3_vl"}

# Models that fail with the mask of a batch.
ONE_ROW = {"phi3small"}
# Its indexer places the queries of all rows in a batch by the longest, whatever the caches.
ALONE = {"minimax_m3_vl"}
# With mlx_lm's own caches also: `afm7` rotates the queries of all rows by the longest,
# `gpt_bigcode` fails, as it counts positions from one row's offset.
OWN_ALONE = ONE_ROW | ALONE | {"afm7", "gpt_bigcode"}

PACKED = set(
    """
    Klear afm7 afmoe apertus baichuan_m1 bailing_moe bailing_moe_linear bitnet cohere cohere2 dbrx
    deepseek deepseek_v2 dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon_h1 gemma
    gemma3 gemma3_text gemma3n gemma4 gemma4_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox
    gpt_oss gptj granite granitemoe granitemoehybrid helium hunyuan hunyuan_v1_dense internlm2
    internlm3 iquestloopcoder jamba laguna lfm2 lfm2-vl lfm2_moe lille-130m llama llama4
    llama4_text mellum mimo mimo_v2_flash minicpm minicpm3 minimax ministral3 mistral3 mixtral
    muse_glimmer muse_spark nanbeige nanochat nemotron nemotron-nas nemotron_h olmo2 olmo3
    olmo_hybrid olmoe openelm phi phi3 phimoe phixtral pixtral plamo3 prism_hadamard_qwen35 qwen
    qwen2 qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe
    recurrent_gemma seed_oss smollm3 solar_open spark2_5 starcoder2 step3p5 talkie telechat3
    youtu_llm
    """.split()
)
# gear is in neither: its own settings decide, so it is probed.

# Up to mlx-lm 0.31 these read the arrays of another layer out of its cache's state.
READ_STATE = {"afm7", "gemma3n"}


def module_names(model: Any) -> list[str]:
    """The modules of ``mlx_lm.models`` that a model, and a language model inside it, come from."""
    names = []
    for part in (model, getattr(model, "language_model", None)):
        package, _, name = type(part).__module__.rpartition(".")
        if package == "mlx_lm.models":
            names.append(name)
    return names


def own_caches(model: Any) -> list[Any]:
    """The caches that the model itself wants: its ``make_cache``, else a `KVCache` a layer."""
    if hasattr(model, "make_cache"):
        return list(model.make_cache())
    return [mlx_caches.KVCache() for _ in model.layers]
