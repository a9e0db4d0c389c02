"""The seed's two tables, measured anew: bytes of the cache, and greedy tokens in common.

Bytes are those of live caches (12 layers, 8 heads, D = 32), all that is allocated counted, beside
what the seed reported for the same shape. Greedy tokens are those before the first that differs
from the ones on an fp32 cache: after short prompts, like the seed's, where sinks and recent tokens
in full precision are nearly all there is, and after long ones, where most of the text is packed.

    python benchmarks/seed_tables.py [--model DIR] [--generate 60]
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from common import arguments, caches, finish, load_model, table
from mlx_lm import stream_generate

from mlx_kivi import KVCacheConfig, QuantizedStreamingCache

LAYERS, HEADS, DIM = 12, 8, 32
# Tokens to MB: bf16, int8 as reported by the seed, int4 as it would be packed.
SEED = {
    128: (1.573, 0.848, 0.455),
    256: (3.146, 1.683, 0.897),
    384: (4.719, 2.519, 1.339),
    500: (6.144, 3.276, 1.740),
    1024: (12.583, 6.697, 3.551),
    2048: (25.166, 13.382, 7.090),
}
STORAGE = ("bf16", "int8", "kivi4", "kivi4-g128")
GREEDY = ("bf16", "int8", "kivi4", "int4")

SHORT = [
    "Once upon a time",
    "The quick brown fox jumps over the lazy dog. ",
    "ROMEO:",
    "def fibonacci(n):\n",
]
LONG = [
    """The lighthouse keeper had not spoken to anyone for eleven days when the boat arrived. At \
first he took it for driftwood, low and grey against the grey water, turning slowly as the tide \
brought it in past the rocks. Then a hand moved. He ran down the two hundred and twelve steps, \
out through the iron door and across the wet shingle, and waded in up to his chest to catch the \
rope that trailed behind it. There was a girl lying in the bottom of the boat, wrapped in a sail. \
She was perhaps nine years old, and she was holding a birdcage with a live canary in it. "You are \
late," she said, quite calmly, as he pulled the boat up on to the stones. "My grandfather said \
that you would see us from the tower yesterday." The keeper stood there, dripping, and could not \
think of anything to say. He looked at the canary, and""",
    """Bread rises because yeast, a single-celled fungus, feeds on the sugars in the dough and \
gives off carbon dioxide. The gas is caught in bubbles by gluten, a net of proteins that forms \
when flour is wetted and kneaded. Kneading stretches the proteins and lines them up, so that the \
net becomes strong and elastic. If the dough is kneaded too little, the gas escapes and the loaf \
stays flat; if it rises for too long, the bubbles grow until their walls break, and it collapses \
in the oven. Salt slows the yeast down and makes the gluten tighter. Warmth speeds the yeast up: \
at twenty degrees a dough may need three hours, at thirty-five less than one. In the first \
minutes of baking the gas expands and the loaf springs up; then the heat kills the yeast, the \
starch sets and the crust turns brown. To make a simple loaf at home, you will need""",
    '''"""A small library of functions on lists of numbers."""


def mean(values):
    """The arithmetic mean of a list that is not empty."""
    return sum(values) / len(values)


def median(values):
    """The middle value, or the mean of the two in the middle."""
    ordered = sorted(values)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2


def variance(values):
    """The mean of the squared distances from the mean."""
    centre = mean(values)
    return mean([(value - centre) ** 2 for value in values])


def standard_deviation(values):
    """The square root of the variance."""
''',
    """<|im_start|>user
I am planning a walk of three days in the hills with my sister, who has never carried a tent \
before. We shall start from the railway station on Friday at noon, and have to be back for the \
train at four on Sunday. The whole round is thirty-four kilometres with about sixteen hundred \
metres of climbing. There is a hut with water after nine kilometres, a lake after twenty-one, \
where we may camp, and a village with one shop after twenty-eight. The weather will be dry on \
Friday and Saturday, with a strong wind from the west on Saturday night, and rain is likely on \
Sunday after ten in the morning. She would like to swim, and I would like to see the sun rise \
from the highest point, which lies between the hut and the lake. How should we divide the walk \
over the three days, and what should we be careful about?<|im_end|>
<|im_start|>assistant
""",
]


def stored(name: str, tokens: int) -> dict[str, int]:
    """Bytes of one cache a layer after so many random tokens: all of it, and packed groups."""
    kind, _, group = name.partition("-g")
    config = KVCacheConfig.from_name(kind, **({"group_size": int(group)} if group else {}))
    mx.random.seed(0)
    total = packed = 0
    for _ in range(LAYERS):
        cache = QuantizedStreamingCache(config)
        keys, values = (mx.random.normal((1, HEADS, tokens, DIM), mx.bfloat16) for _ in range(2))
        cache.update_and_fetch(keys, values)
        mx.eval(cache.state)  # settles the chunk
        total += cache.nbytes
        packed += cache.nbytes - cache.keys.nbytes - cache.values.nbytes
    return {"bytes": total, "packed": packed if config.quantized else 0}


def bytes_table() -> dict[str, Any]:
    results = {t: {name: stored(name, t) for name in STORAGE} for t in SEED}
    rows = []
    for tokens, by_name in results.items():
        theirs = SEED[tokens]
        row = [f"{tokens:,}"]
        for name, seed in zip(STORAGE, (*theirs, theirs[-1]), strict=True):
            mine = by_name[name]
            text = f"{mine['bytes'] / 1e6:.3f}"
            if mine["packed"]:
                text += f" ({mine['packed'] / 1e6:.3f} packed)"
            row.append(f"{text} / {seed:.3f}")
        rows.append(row)
    print(f"MB of a cache, {LAYERS} layers, {HEADS} heads, D = {DIM}: ours / the seed's")
    table(["tokens", *STORAGE], rows)
    return results


def greedy(model: Any, tokenizer: Any, name: str, prompt: str, count: int) -> dict[str, Any]:
    """What follows a prompt on a cache.

    Returns:
        tokens; gaps: by how many nats each was likelier than the next best; packed: how many
        tokens of the text were packed in the end.
    """
    cache = caches(model, name)
    tokens, gaps = [], []
    for r in stream_generate(model, tokenizer, prompt, max_tokens=count, prompt_cache=cache):
        tokens.append(r.token)
        best = np.sort(np.array(r.logprobs.astype(mx.float32)))[-2:]
        gaps.append(float(best[1] - best[0]))
    packed = getattr(cache[0], "packed_tokens", 0)
    return {"tokens": tokens, "gaps": gaps, "packed": packed}


def greedy_table(
    model: Any, tokenizer: Any, title: str, prompts: list[str], count: int
) -> dict[str, float]:
    """Print how much of an fp32 cache's text each storage repeats; returns the means."""
    matches: dict[str, list[float]] = {name: [] for name in GREEDY}
    rows = []
    for number, prompt in enumerate(prompts, 1):
        full = greedy(model, tokenizer, "stock", prompt, count)
        wanted, cells = full["tokens"], []
        for name in GREEDY:
            run = greedy(model, tokenizer, name, prompt, count)
            same = [a == b for a, b in zip(wanted, run["tokens"], strict=False)]
            first = same.index(False) if False in same else len(same)
            matches[name].append(first / len(wanted))
            tie = f" (gap {full['gaps'][first]:.2f})" if first < len(wanted) else ""
            cells.append(f"{matches[name][-1]:.0%}{tie}")
        length = len(tokenizer.encode(prompt))
        rows.append([f"{number}: {length} tokens, {run['packed']} packed at the end", *cells])
    means = {name: float(np.mean(values)) for name, values in matches.items()}
    rows.append(["mean", *(f"{means[name]:.0%}" for name in GREEDY)])
    rows.append(["mean, the seed on its model", "88%", "100%", "96%"])
    print(f"{title}: greedy tokens in common with an fp32 cache, of {count}")
    table(["prompt", *GREEDY], rows)
    print()
    return means


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--generate", type=int, default=60, help="Tokens a prompt. Default: 60")
    args = parser.parse_args()
    live = bytes_table()
    print()
    model, tokenizer = load_model(args.model)
    short, long = (
        greedy_table(model, tokenizer, title, prompts, args.generate)
        for title, prompts in (("Short prompts, as the seed's", SHORT), ("Long prompts", LONG))
    )
    print("(gap: nats between the fp32 cache's two likeliest tokens where the texts part)")
    finish("seed_tables", bytes=live, seed=SEED, greedy_short=short, greedy_long=long)


if __name__ == "__main__":
    main()
