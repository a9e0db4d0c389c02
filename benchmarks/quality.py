"""How far a cache moves a model from its full-precision self.

A text is fed through the cache as it stands (teacher forced), and the distribution of each next
token is compared with the one that the full-precision stock cache gives: KL divergence in nats,
mean and 99th percentile; changes of the most likely token; change in perplexity. Two legs: *chunk*,
calls of 32 tokens; *decode*, three quarters of the text in one call, then single tokens, which
alone are judged. A model with a table of learned positions gets the text in pieces of that size.

    python benchmarks/quality.py [--texts FILE … pydoc] [--legs chunk decode] [--caches int4 …]
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from common import arguments, caches, finish, load_model, table
from tqdm import tqdm

from mlx_kivi.models.learned_positions import table_size

TEXTS = ["/usr/share/common-licenses/GPL-3", "pydoc"]
DEFAULT = [
    *("stock-8-g64", "stock-4-g64", "stock-2-g32"),
    *("int8", "int4", "int3", "int2", "int2s", "kivi4", "kivi2"),
]


def text_of(name: str) -> str:
    """A file's text, or what Python's own help has to say ("pydoc")."""
    if name != "pydoc":
        return Path(name).read_text()
    topics = pydoc_data.topics.topics
    return "\n".join(topics[topic] for topic in sorted(topics))


def log_probs(model: Any, name: str, pieces: list[mx.array], leg: str, chunk: int) -> mx.array:
    """Log-probabilities after each token that counts, fed through caches: [tokens, vocabulary]."""
    rows = []
    for piece in tqdm(pieces, f"{name} {leg}", leave=False, disable=len(pieces) == 1):
        cache = caches(model, name)
        for start, stop, counts in tqdm(list(calls(piece.size, leg, chunk)), name, leave=False):
            logits = model(piece[None, start:stop], cache=cache)[0].astype(mx.float32)
            if counts:
                rows.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
            mx.eval(logits, rows[-1:])
    return mx.concatenate(rows)


def calls(tokens: int, leg: str, chunk: int) -> Iterator[tuple[int, int, bool]]:
    """From where to where each call goes, and whether its tokens count."""
    if leg == "chunk":
        yield from ((i, min(i + chunk, tokens), True) for i in range(0, tokens, chunk))
        return
    prompt = tokens * 3 // 4
    yield 0, prompt, False
    yield from ((i, i + 1, True) for i in range(prompt, tokens))


def compare(
    full: mx.array, other: mx.array, followed: mx.array, targets: mx.array
) -> dict[str, float]:
    """Figures of log-probabilities [tokens, V]; ``targets`` came after tokens ``followed``."""
    kl = np.array(mx.sum(mx.exp(full) * (full - other), axis=-1))
    flips = mx.mean(mx.argmax(full, axis=-1) != mx.argmax(other, axis=-1)).item()
    nats = [
        -mx.take_along_axis(p[followed], targets[:, None], axis=-1).mean().item()
        for p in (full, other)
    ]
    return {
        "kl": float(kl.mean()),
        "kl_p99": float(np.percentile(kl, 99)),
        "flips": flips,
        "perplexity": float(np.exp(nats[1])),
        "perplexity_change": float(np.expm1(nats[1] - nats[0])),
    }


def measure(model: Any, names: list[str], tokens: mx.array, leg: str, chunk: int) -> dict[str, Any]:
    """What `compare` says of each cache, for a text and a leg."""
    size = table_size(model) or tokens.size
    pieces = [tokens[i : i + size] for i in range(0, tokens.size - size + 1, size)]
    counted = [start for start, _, counts in calls(size, leg, chunk) if counts][0]
    rows = size - counted
    followed = mx.array([i for i in range(rows * len(pieces)) if (i + 1) % rows])
    targets = mx.concatenate([piece[counted + 1 :] for piece in pieces])
    known = followed, targets
    full = log_probs(model, "stock", pieces, leg, chunk)
    found = {}
    for name in names:
        found[name] = compare(full, log_probs(model, name, pieces, leg, chunk), *known)
        mx.clear_cache()
    return found


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--texts", nargs="+", default=TEXTS, help=f"Files, or pydoc. Default: {' '.join(TEXTS)}"
    )
    parser.add_argument("--legs", nargs="+", default=["chunk"], choices=["chunk", "decode"])
    parser.add_argument("--tokens", type=int, default=1024, help="Of each text. Default: 1024")
    parser.add_argument("--chunk", type=int, default=32, help="Tokens a call. Default: 32")
    parser.add_argument("--caches", nargs="+", default=DEFAULT, help=f"Default: {DEFAULT}")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model)
    results: dict[str, dict[str, Any]] = {}
    for name in args.texts:
        tokens = mx.array(tokenizer.encode(text_of(name)[: 8 * args.tokens])[: args.tokens])
        for leg in args.legs:
            found = measure(model, args.caches, tokens, leg, args.chunk)
            results[f"{Path(name).stem} {leg}"] = found
            print(f"\n{Path(name).stem}, {leg}")
            headers = ["cache", "KL mean", "KL p99", "top-1 flips", "perplexity", "change"]
            table(headers, [row(cache, r) for cache, r in found.items()])
    if len(results) > 1:
        print("\nWorst KL mean of all")
        worst = {c: max(found[c]["kl"] for found in results.values()) for c in args.caches}
        table(["cache", "KL mean"], [[c, f"{kl:.6f}"] for c, kl in worst.items()])
    finish("quality", model=Path(args.model).name, tokens=args.tokens, results=results)


def row(name: str, r: dict[str, float]) -> list[str]:
    return [
        name,
        f"{r['kl']:.6f}",
        f"{r['kl_p99']:.5f}",
        f"{r['flips']:.1%}",
        f"{r['perplexity']:.2f}",
        f"{r['perplexity_change']:+.2%}",
    ]


if __name__ == "__main__":
    main()
