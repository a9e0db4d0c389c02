"""How far a cache moves a model from its full-precision self.

A text is fed through the cache in chunks, as it stands (teacher forced), and the distribution of
each next token is compared with the one that the full-precision stock cache gives: KL divergence
in nats, mean and 99th percentile; changes of the most likely token; change in perplexity.

    python benchmarks/quality.py --text FILE [--tokens 1024] [--caches int8 int4 int2 …]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from common import arguments, caches, finish, load_model, table
from tqdm import tqdm

DEFAULT = [
    *("stock-8-g64", "stock-4-g64", "stock-2-g32"),
    *("int8", "int4", "int3", "int2"),
]


def log_probs(model: Any, name: str, tokens: mx.array, chunk: int) -> mx.array:
    """Log-probabilities after each token, fed through a cache: [tokens, vocabulary]."""
    cache = caches(model, name)
    rows = []
    for start in tqdm(range(0, tokens.size, chunk), desc=name, leave=False):
        logits = model(tokens[None, start : start + chunk], cache=cache)[0].astype(mx.float32)
        rows.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(rows[-1], [c.state for c in cache])
    return mx.concatenate(rows)


def compare(full: mx.array, other: mx.array, tokens: mx.array) -> dict[str, float]:
    kl = np.array(mx.sum(mx.exp(full) * (full - other), axis=-1))
    flips = mx.mean(mx.argmax(full, axis=-1) != mx.argmax(other, axis=-1)).item()
    nats = [
        -mx.take_along_axis(p[:-1], tokens[1:, None], axis=-1).mean().item() for p in (full, other)
    ]
    return {
        "kl": float(kl.mean()),
        "kl_p99": float(np.percentile(kl, 99)),
        "flips": flips,
        "perplexity": float(np.exp(nats[1])),
        "perplexity_change": float(np.expm1(nats[1] - nats[0])),
    }


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--text", required=True, help="Text file to feed")
    parser.add_argument("--tokens", type=int, default=1024, help="Default: 1024")
    parser.add_argument("--chunk", type=int, default=32, help="Tokens a call. Default: 32")
    parser.add_argument("--caches", nargs="+", default=DEFAULT, help=f"Default: {DEFAULT}")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model)
    tokens = mx.array(tokenizer.encode(Path(args.text).read_text())[: args.tokens])
    full = log_probs(model, "stock", tokens, args.chunk)
    results = {}
    for name in args.caches:
        results[name] = compare(full, log_probs(model, name, tokens, args.chunk), tokens)
        mx.clear_cache()
    rows = [
        [
            name,
            f"{r['kl']:.6f}",
            f"{r['kl_p99']:.5f}",
            f"{r['flips']:.1%}",
            f"{r['perplexity']:.2f}",
            f"{r['perplexity_change']:+.2%}",
        ]
        for name, r in results.items()
    ]
    table(["cache", "KL mean", "KL p99", "top-1 flips", "perplexity", "change"], rows)
    finish("quality", text=Path(args.text).name, tokens=tokens.size, results=results)


if __name__ == "__main__":
    main()
