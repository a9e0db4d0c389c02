"""A stream without end: bytes, time a token and memory of the process have to stay flat.

By default a tiny random model, its cache in 4 bits with sinks and a window, is fed one random
token after the other. With --model, a real one is timed around 1,000 and around 20,000 tokens.

    python benchmarks/stream.py [--tokens 1000000]
    python benchmarks/stream.py --model models/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import psutil
from common import finish, load_model, table
from decode import decode, fill
from mlx.utils import tree_map
from mlx_lm.models.llama import Model, ModelArgs
from tqdm import tqdm

from mlx_kivi import KVCacheConfig, make_prompt_cache

CONFIG = KVCacheConfig.from_name("int4", sink=4, window=252)
VOCABULARY = 97
NEAR, FAR = 1_000, 20_000  # tokens at which a real model is timed
SLOWER = 1.1  # at most, of the later time a token against the earlier
LARGER = 1.1  # the same of memory


@dataclass(frozen=True)
class Row:
    """A stretch of the stream: its end, and bytes, milliseconds a token, memory of the process."""

    tokens: int
    cache_bytes: int
    milliseconds: float
    process_bytes: int
    finite: bool


def tiny_model() -> Model:
    """A random llama of one layer, 2 heads of 32."""
    mx.random.seed(0)
    args = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
    }
    model = Model(ModelArgs.from_dict(args))
    mx.eval(model.parameters())
    return model


def soak(model: Any, config: KVCacheConfig, tokens: int, rows: int = 20) -> list[Row]:
    """Feed ``tokens`` random tokens one by one; ``rows`` stretches of equal length."""
    cache = make_prompt_cache(model, config)
    process, random = psutil.Process(), np.random.default_rng(0)
    series = []
    ends = [tokens * (i + 1) // rows for i in range(rows)]
    with tqdm(total=tokens, unit=" tokens", leave=False) as bar:
        for start, end in zip([0, *ends], ends, strict=False):
            times, finite = [], mx.array(True)
            for token in random.integers(0, VOCABULARY, end - start).tolist():
                began = time.perf_counter()
                finite = finite & mx.isfinite(model(mx.array([[token]]), cache=cache)).all()
                mx.eval(finite)
                times.append(time.perf_counter() - began)
            count = sum(c.nbytes for c in cache)
            mx.clear_cache()
            memory = process.memory_info().rss
            milliseconds = float(np.median(times)) * 1e3
            series.append(Row(end, count, milliseconds, memory, finite.item()))
            bar.update(end - start)
    return series


def checks(series: list[Row]) -> dict[str, bool]:
    """What has to hold, once the cache is full and the process warm: after a tenth."""
    later = series[len(series) // 10 :]
    half = len(later) // 2
    # The least disturbed stretch of each half: other work on the machine only adds.
    early, late = (min(r.milliseconds for r in part) for part in (later[:half], later[half:]))
    return {
        "no NaN": all(row.finite for row in series),
        "bytes flat": len({row.cache_bytes for row in later}) == 1,
        "time flat": late <= SLOWER * early,
        "process memory flat": later[-1].process_bytes <= LARGER * later[0].process_bytes,
    }


def real(path: str) -> bool:
    model, _ = load_model(path)
    model.update(tree_map(lambda p: p.astype(mx.float32), model.parameters()))
    filled = {}
    for count in (NEAR, FAR):
        filled[count] = make_prompt_cache(model, CONFIG)
        fill(model, filled[count], count, mx.float32)
    bytes_ = {count: sum(c.nbytes for c in cache) for count, cache in filled.items()}
    times = decode(model, filled, steps=15)
    ratio = times[FAR] / times[NEAR]
    table(
        ["tokens", "cache bytes", "milliseconds"],
        [[f"{n:,}", f"{bytes_[n]:,}", f"{times[n]:.1f}"] for n in filled],
    )
    print(f"time a token around {FAR:,} against around {NEAR:,}: {ratio:.3f}, at most {SLOWER}")
    finish("stream", model=path, milliseconds=times, bytes=bytes_, ratio=ratio)
    return ratio <= SLOWER and bytes_[NEAR] == bytes_[FAR]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000, help="Default: 1000000")
    parser.add_argument("--model", help="Time this model directory's model instead")
    args = parser.parse_args()
    if args.model:
        sys.exit(not real(args.model))
    series = soak(tiny_model(), CONFIG, args.tokens)
    table(
        ["tokens", "cache bytes", "milliseconds", "process MB"],
        [
            [f"{r.tokens:,}", f"{r.cache_bytes:,}", f"{r.milliseconds:.3f}"]
            + [f"{r.process_bytes / 1e6:.1f}"]
            for r in series
        ],
    )
    passed = checks(series)
    print(", ".join(f"{name}: {'yes' if ok else 'NO'}" for name, ok in passed.items()))
    finish("stream", tokens=args.tokens, checks=passed, series=[asdict(row) for row in series])
    sys.exit(not all(passed.values()))


if __name__ == "__main__":
    main()
