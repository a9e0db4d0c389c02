"""Write docs/architectures.md: how each architecture is stored and read, as it was measured here.

    python -m conformance.report

One tiny random model a module generates under int4 + sinks + window.
"""

from __future__ import annotations

import os
import platform
import sys
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

import mlx_kivi
from conformance.architectures import matrix, models
from conformance.architectures.reference import flat
from mlx_kivi.models.architectures import DENSE, PACKED, own_caches

PATH = Path(__file__).parent.parent / "docs" / "architectures.md"
POLICY = "int4 + sinks + window"
# Its settings choose how it attends; plain here.
PROBED = {"gear"}
LEFT_ALONE = {
    "ArraysCache": "recurrent state, of one size however many tokens it has seen",
    "ChunkedKVCache": "the model itself drops what lies before its chunk",
    "LayerCache": "a class of the model's own, which gathers rows of compressed tokens",
}
HEADER = "| module | its caches | stored packed | read | why dense | left alone |"


@dataclass(frozen=True)
class Row:
    """One module: kinds of cache it makes and how many, how many of ours, how they are read."""

    name: str
    kinds: Counter[str]
    ours: int

    @property
    def line(self) -> str:
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(self.kinds.items()))
        total = sum(n for kind, n in self.kinds.items() if kind != "ArraysCache")
        stored = "all" if total == self.ours else f"{self.ours} of {total}"
        stored = stored if self.ours else "none"
        left = ", ".join(kind for kind in LEFT_ALONE if kind in self.kinds)
        why = DENSE.get(self.name, "")
        return f"| `{self.name}` | {kinds} | {stored} | {reads(self.name)} | {why} | {left} |"


def reads(name: str) -> str:
    """What a module's attention reads of our caches, by `models.architectures`."""
    if name in DENSE:
        return "dense"
    return "packed" if name in PACKED | PROBED else "none"


def measure(name: str) -> Row:
    """Generate with a module.

    Raises:
        RuntimeError: if anything of ours is not stored packed, or not read as the table says.
    """
    model = models.build(name)
    caches = mlx_kivi.make_prompt_cache(model, matrix.POLICIES[POLICY])
    *prompt, token = matrix.parts()[:5]
    for part in prompt:
        mx.eval(matrix.logits(model, part, caches))
    with matrix.counted() as counts:
        mx.eval(matrix.logits(model, token, caches))
    ours = [c for c in flat(caches) if isinstance(c, mlx_kivi.QuantizedStreamingCache)]
    if not all(cache.packed_tokens for cache in ours):
        raise RuntimeError(f"{name}: a layer is not stored packed")
    read = "dense" if counts.dense else "packed" if counts.packed else "none"
    if read != reads(name):
        raise RuntimeError(f"{name}: read {read}, and not {reads(name)}: mend the tables")
    kinds = Counter(type(cache).__name__ for cache in flat(own_caches(model)))
    return Row(name, kinds, len(ours))


def document(rows: list[Row]) -> str:
    """The page. Numbers in its text are counts of its own rows."""
    by_read = Counter(reads(row.name) for row in rows)
    keep = [row for row in rows if {"KVCache", "RotatingKVCache"} & set(row.kinds)]
    whole = [row for row in keep if "ChunkedKVCache" not in row.kinds]
    return f"""# Architectures

Each module of `mlx_lm.models` in mlx-lm {models.MLX_LM}, with a tiny random model, generating
under {POLICY} (mlx {version("mlx")}, {os.cpu_count()}-core {platform.machine()} CPU build).
Written by `python -m conformance.report`; the tests in `conformance/architectures` compare every
module, under five policies, with the stock caches or a dense reference.

- {len(rows)} of {len(rows)} generate.
- {len(keep)} have a `KVCache` or `RotatingKVCache`; {len(whole)} of them store the keys and
  values of every attention layer packed. The other one is `llama4`, in three layers of four.
- {by_read["packed"]} are read packed: their attention works on quantised data, through handles.
- {by_read["dense"]} are read dense: stored packed all the same, they get arrays, unpacked layer by
  layer at each call.
- {by_read["none"]} have nothing that we store.

A module that is not in this table (your own model, a newer mlx-lm) is tried once, and read dense
when in doubt. `mlx_kivi.describe(model, caches)` says for a model what is left alone, in bytes.

{HEADER}
|---|---|---|---|---|
{chr(10).join(row.line for row in rows)}

## Left alone

{chr(10).join(f"- `{kind}`: {why}." for kind, why in LEFT_ALONE.items())}

## Remarks

- `deepseek_v32`, `glm_moe_dsa`, `minimax_m3_vl`: indexer caches, in 8 bits at least, evict in
  lockstep with their main cache. An indexer that picks blocks counts them among the tokens kept,
  and so do the block-sparse layers of `phi3small`.
- `afm7` takes the position of queries from the number of keys: with a window, handles say the
  number of keys ever seen.
- `plamo3`: mlx-lm builds its cache for a window of W tokens and its mask for W + 1. Ours show W.
- `mistral3`, `pixtral`, `smollm3` make plain caches for layers with a trained window and mask
  them: sinks do not widen that window.
- With mlx-lm 0.31, `afm7` and `gemma3n` read the arrays of another layer out of its cache's state,
  and keep their own caches; `minicpm3` and `phixtral` mask the later chunks of a prompt without
  asking their caches, so that a window lets their tokens see too much there.
- `bitnet` and `muse_spark` need Metal, and `olmo` fails in mlx-lm itself: the tests put plain mlx
  in place of the kernels, and an additive mask in place of olmo's.
"""


def main() -> int:
    mx.disable_compile()  # on a CPU, it would run the system's compiler for each fused function
    if missing := sorted(set(models.CONFIGS) - set(models.names())):
        print(f"mlx-lm {models.MLX_LM} lacks {', '.join(missing)}: install a newer one")
        return 1
    try:
        rows = [measure(name) for name in sorted(models.names(), key=str.lower)]
    except RuntimeError as error:
        print(error)
        return 1
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(document(rows))
    print(f"{PATH.relative_to(PATH.parent.parent)}: {len(rows)} modules")
    return 0


if __name__ == "__main__":
    sys.exit(main())
