"""Write docs/architectures.md: how each architecture is stored and read, as it was measured here.

    python -m conformance.report

One tiny random model a module generates under int4 + sinks + window, alone and in a batch.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from textwrap import fill
from typing import Any

import mlx.core as mx

import mlx_kivi
from conformance.architectures import batches, matrix, models
from conformance.architectures.reference import flat
from mlx_kivi.models import basis_files
from mlx_kivi.models.architectures import DENSE, INDEXED, LATENT, PACKED, own_caches
from mlx_kivi.report import size

PATH = Path(__file__).parent.parent / "docs" / "architectures.md"
POLICY = "int4 + sinks + window"
# Its settings choose how it attends; plain here.
PROBED = {"gear"}
LEFT_ALONE = {
    "ArraysCache": "recurrent state, of one size however many tokens it has seen",
    "LayerCache": "a class of DeepSeek V4.1's own, out of which the model takes compressed rows as "
    "arrays and gathers some: packed, all would be unpacked at each step. A layer that makes them "
    "for others holds (`head_dim` + `index_head_dim`) / ratio channels a token, 1,280 B at a ratio "
    "of 1 in 16 bits (512 + 128 channels), where 4 bits would take 360 B; the others do not grow",
}
HEADER = (
    "| module | its caches | stored packed | keys' basis | read | a step unpacks | why "
    "| left alone | in a batch |"
)
BALANCED, PLAIN = "balanced", "as they are"
# What a step of one token unpacks, beside what is held.
KEYS_AND_VALUES = "a layer's keys and values"
POSITIONAL = "a layer's positional part"
POSITIONAL_OR_ALL = "a layer's positional part; all of it past `index_topk` tokens"


@dataclass(frozen=True)
class Row:
    """One module: kinds of cache it makes and how many, how many of ours, what their keys are
    packed in."""

    name: str
    kinds: Counter[str]
    ours: int
    basis: str

    @property
    def line(self) -> str:
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(self.kinds.items()))
        left = ", ".join(kind for kind in LEFT_ALONE if kind in self.kinds)
        why = DENSE.get(self.name, "")
        how = f"{reads(self.name)} | {unpacks(self.name)} | {why}"
        batch = batches.cell(self.name)
        return (
            f"| `{self.name}` | {kinds} | {self.stored} | {self.basis} | {how} | {left} | {batch} |"
        )

    @property
    def stored(self) -> str:
        total = sum(n for kind, n in self.kinds.items() if kind != "ArraysCache")
        stored = "all" if total == self.ours else f"{self.ours} of {total}"
        return stored if self.ours else "none"


def bases(caches: list[Any]) -> str:
    """What the keys of a model's caches are packed in, each kind named once."""
    found = []
    for cache in flat(caches):
        if isinstance(cache, mlx_kivi.QuantizedStreamingCache):
            moved = cache.config.moves_keys and cache.balance is not None
            found.append(BALANCED if moved else PLAIN)
    return ", ".join(basis for basis in (BALANCED, PLAIN) if basis in found)


def reads(name: str) -> str:
    """What a module's attention reads of our caches, by `models.architectures`."""
    if name in LATENT:
        return "packed at decode"
    if name in DENSE:
        return "arrays"
    return "packed" if name in PACKED | PROBED else "none"


def unpacks(name: str) -> str:
    """What a step of one token unpacks on a GPU, by `models.architectures`."""
    if name in LATENT:
        return POSITIONAL_OR_ALL if name in INDEXED else POSITIONAL
    return KEYS_AND_VALUES if name in DENSE else "nothing"


def measure(name: str) -> Row:
    """Generate with a module.

    Raises:
        RuntimeError: if anything of ours is not stored packed, or not read as the table says, or
            rows in a batch are not what `batches.cell` says.
    """
    model = models.build(name)
    if name in LATENT & INDEXED:  # fewer tokens than its indexer picks
        model = type(model)(type(model.args)(**{**vars(model.args), "index_topk": 512}))
    caches = mlx_kivi.make_prompt_cache(model, matrix.POLICIES[POLICY])
    *prompt, token = matrix.parts()[:5]
    for part in prompt:
        mx.eval(matrix.logits(model, part, caches))
    with matrix.counted() as counts:
        mx.eval(matrix.logits(model, token, caches))
    ours = [c for c in flat(caches) if isinstance(c, mlx_kivi.QuantizedStreamingCache)]
    # Only a window that the model was trained with may be too small to pay.
    trained = matrix.POLICIES[POLICY].window
    if not all(cache.packed_tokens or cache.config.window != trained for cache in ours):
        raise RuntimeError(f"{name}: a layer is not stored packed")
    read = "arrays" if counts.dense else "packed" if counts.packed else "none"
    read = "packed at decode" if counts.latent else read
    if read != reads(name):
        raise RuntimeError(f"{name}: read {read}, and not {reads(name)}: mend the tables")
    for policy in [None, POLICY]:
        batches.check(name, policy)
    kinds = Counter(type(cache).__name__ for cache in flat(own_caches(model)))
    return Row(name, kinds, len(ours), bases(caches))


def document(rows: list[Row]) -> str:
    """The page. Numbers in its text are counts of its own rows."""
    by_read = Counter(reads(row.name) for row in rows)
    by_basis = Counter(basis for row in rows for basis in row.basis.split(", "))
    packed = [row for row in rows if reads(row.name) == "packed"]
    others = [f"`{row.name}` ({row.basis})" for row in packed if row.basis != BALANCED]
    taken = len(packed) - len(others)
    keep = [row for row in rows if row.ours]
    stored = [row for row in keep if row.stored == "all"]
    as_alone = [row for row in rows if batches.cell(row.name).startswith("as alone")]
    deviating = fill(
        f"The stock batch deviates with these {len(batches.DEVIATES)}: {named(batches.DEVIATES)}; "
        "and with",
        100,
    )
    whole = fill(
        f"`afm7` and `gpt_bigcode` are right with ours. {named(batches.WHOLE_CALL)} are right, "
        "with both, if `prefill_step_size` is a multiple of 256, as it is by default: in other "
        "calls `ssm_attn` of mlx-lm reads beyond the call to find the end of a row. With "
        "mlx-lm 0.31 both deviate there in any case; so do, with the stock caches alone, "
        f"{named(batches.MASKED_BLINDLY)} (mlx-lm issue 1906), and with both "
        f"{named(batches.PADDED_STATES)}; {named(batches.ONE_POSITION)} fail.",
        100,
    )
    # Bytes a channel that a step takes, as `Part.step_bytes` of mlx_kivi.report counts them.
    each = (0, 10), (10, 10), (8, 10)
    part, latents, on_cpu = (size((512 * a + 64 * b) * 32_768) for a, b in each)
    return f"""# Architectures

Each module of `mlx_lm.models` in mlx-lm {models.MLX_LM}, with a tiny random model, generating
under {POLICY} (mlx {version("mlx")}, {os.cpu_count()}-core {platform.machine()} CPU build).
Written by `python -m conformance.report`; the tests in `conformance/architectures` compare every
module, under {len(matrix.POLICIES)} policies, with the stock caches or a dense reference.

- {len(rows)} of {len(rows)} generate.
- {len(stored)} of the {len(keep)} that have caches of keys and values store them packed, in every
  attention layer. A window that the model was trained with is left unpacked where it is so small
  that packing it does not pay.
- {by_read["packed"]} are read packed: their attention works on quantised data, through handles.
- {by_read["packed at decode"]} are read packed at decode: a step of one token multiplies packed
  latents, which are its keys and values at once. Calls of several tokens get arrays.
- {by_read["arrays"]} get arrays, unpacked from the same packed storage at each call.
- {by_read["none"]} have nothing that we store.

Arrays are unpacked layer by layer, each once the call has reached it: what is unpacked at a time
does not grow with depth. While a prompt is fed, each layer holds that call's own tokens besides
until they are stored; `nbytes` counts them. A module that is not in this table (your own model, a
newer mlx-lm) is tried once, and gets arrays when in doubt.

What a step unpacks takes, beside what is held and for one layer at a time, two copies in float32
and the array in the model's own type: 10 B a channel and token in 16 bits. For latent attention of
512 + 64 channels at 32,768 tokens that is {part} for the positional part alone, and {latents} where
an indexer has to choose. On a CPU, whose products of packed data are slower than unpacking once for
so many heads, the latent takes 8 B a channel more, {on_cpu} in all.
`mlx_kivi.describe(model, caches)` says these bytes for a model, and what is left alone.

## The basis of keys

In fewer than 8 bits, values are mixed by Hadamard's matrix, but for the parts of latents, and keys
are packed in another basis than their own where one is known. How many modules have which keys:

- `{BALANCED}`, {by_basis[BALANCED]}: measured of each layer, in one pass over random tokens that
  sees the queries of all layers that read the cache. {taken} of the {len(packed)} read packed take
  it; the others: {", ".join(others) or "none"}.
- `{PLAIN}`, {by_basis[PLAIN]}: keys that models get as arrays, whose queries are not seen; latents,
  which are keys and values at once; and the keys of indexers, which are in 8 bits.

Keys and queries are seen as attention gets them, so that what a model does before is right by
itself: RoPE on a part of a head, norms of queries and keys, trained windows, layers that share
their keys. Learned sinks are logits of their own and meet no key. Scores that are capped (`gemma2`)
are computed by the model itself, which gets arrays.

## In a batch

Three rows of unequal length, two prompts each and steps, beside each of the rows alone.

- {len(as_alone)} of {len(rows)} are `as alone`: the logits of each row are those of the row alone.
- {len(batches.DEVIATES)} are `as mlx-lm's`: what the model itself does with padding is wrong, with
  the stock caches and with ours. The row without padding, the longest, is as alone.
- {len(batches.NONE)} can't be batched, and say so before any work.

{deviating}

{chr(10).join(f"- `{name}`: {why}." for name, why in batches.STOCK_DEVIATES.items())}

{whole}

## The table

{HEADER}
|---|---|---|---|---|---|---|---|---|
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


def named(names: Iterable[str]) -> str:
    """Names in a sentence."""
    return ", ".join(f"`{name}`" for name in sorted(names))


def rows_of_the_page() -> dict[str, list[str]]:
    """Cells of the page's table, as it is written, by the name of the module."""
    lines = PATH.read_text().splitlines()
    rows = {}
    for line in lines[lines.index(HEADER) + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name.strip("`")] = cells
    return rows


def main() -> int:
    mx.disable_compile()  # on a CPU, it would run the system's compiler for each fused function
    if missing := sorted(set(models.CONFIGS) - set(models.names())):
        print(f"mlx-lm {models.MLX_LM} lacks {', '.join(missing)}: install a newer one")
        return 1
    own = basis_files.directory
    try:
        with tempfile.TemporaryDirectory() as place:  # not the user's, for models of no use
            basis_files.directory = lambda: Path(place)
            rows = [measure(name) for name in sorted(models.names(), key=str.lower)]
    except RuntimeError as error:
        print(error)
        return 1
    finally:
        basis_files.directory = own
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(document(rows))
    print(f"{PATH.relative_to(PATH.parent.parent)}: {len(rows)} modules")
    return 0


if __name__ == "__main__":
    sys.exit(main())
