"""Multi-head latent attention (DeepSeek V3's shapes): memory of a step, peak, speed and traffic.

Random weights; the latent has rank 512, the positional part 64. Peaks are of processes that do
nothing else, above what they took before.

    python benchmarks/latent.py [--tokens 8192] [--against DIR]

--against: another checkout, to decode with in turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import psutil
from common import finish, table
from decode import decode
from mlx_lm.generate import generate_step
from mlx_lm.models import deepseek_v3
from mlx_lm.models.cache import KVCache

from mlx_kivi import KVCacheConfig, make_prompt_cache

RANK, POSITIONAL = 512, 64
CACHES = ["stock", "int4"]
SHORT = 1024  # tokens of the memory of a step
STEP, NEW = 512, 16  # tokens of a prompt's step; generated after it
ROUNDS = 3  # of decoding, by each checkout in turn


def build(layers: int, heads: int) -> Any:
    """DeepSeek V3's attention, and as little as possible of everything else."""
    mx.random.seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
    sizes |= {"moe_intermediate_size": 64, "n_routed_experts": None, "q_lora_rank": 16}
    sizes |= {"kv_lora_rank": RANK, "qk_rope_head_dim": POSITIONAL}
    sizes |= {"qk_nope_head_dim": 32, "v_head_dim": 32, "rope_scaling": None}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": heads}
    args = {"model_type": "deepseek_v3", "num_key_value_heads": heads, **sizes}
    model = deepseek_v3.Model(deepseek_v3.ModelArgs.from_dict(args))
    mx.eval(model.parameters())
    return model


def new(model: Any, name: str) -> list[Any]:
    if name == "stock":
        return [KVCache() for _ in model.layers]
    return make_prompt_cache(model, KVCacheConfig.from_name(name))


def fill(cache: list[Any], tokens: int, dtype: mx.Dtype = mx.float32) -> None:
    """Tokens that no model saw."""
    for layer in cache:
        for start in range(0, tokens, 2048):
            shape = (1, 1, min(2048, tokens - start))
            pair = (mx.random.normal((*shape, dim), dtype) for dim in (RANK, POSITIONAL))
            layer.update_and_fetch(*pair)
            mx.eval(layer.state)


def step_memory(layers: int, name: str) -> dict[str, int]:
    """Bytes held after a prompt, and taken besides by the step that follows."""
    model = build(layers, 2)
    cache = new(model, name)
    for count in [256] * (SHORT // 256) + [1]:
        mx.eval(model(mx.zeros((1, count), mx.int32), cache=cache), [c.state for c in cache])
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(model(mx.zeros((1, 1), mx.int32), cache=cache))
    return {"held": sum(c.nbytes for c in cache), "step": mx.get_peak_memory() - before}


def process_peak(name: str, tokens: int) -> int:
    """Bytes that a process takes at most for a prompt and some tokens."""
    model = build(16, 2)

    def generate(prompt: int) -> None:
        steps = generate_step(
            mx.zeros(prompt, mx.int32),
            model,
            max_tokens=NEW,
            prefill_step_size=STEP,
            prompt_cache=new(model, name),
        )
        for _ in steps:
            pass

    generate(8)  # what the first use of anything costs
    gc.collect()
    mx.clear_cache()
    before = psutil.Process().memory_info().rss
    generate(tokens)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before


def step_time(tokens: int) -> dict[str, float]:
    """Milliseconds of a decoded token at 16 heads, by cache."""
    model = build(16, 16)
    filled = {name: new(model, name) for name in CACHES}
    for cache in filled.values():
        fill(cache, tokens)
    return decode(model, filled, steps=5)


def traffic(tokens: int) -> dict[str, int]:
    """Bytes of latents that a step reads and writes in one layer, from shapes, for a model in
    float16.

    Stock: the latent twice, as keys and as values, and the positional part.

    int4: both products read words, scales and zeros of all groups, and the ring in float16. Of the
    positional part, the store and the ring are read, and what is made of them is written and read.
    Not counted: the new token; and what conversions write in between, which a GPU does within
    its products: scales and zeros in float32 (where the CPU multiplies), the positional part
    before its cast.
    """
    (cache,) = filled = new(build(1, 16), "int4")
    fill(filled, tokens, mx.float16)
    (latent, positional), ring = cache._stores, cache._ring
    packed = [sum(a.nbytes for a in store.live_arrays()) for store in (latent, positional)]
    unpacked = cache.size() * POSITIONAL * 2
    ours = 2 * (packed[0] + ring[0].nbytes) + packed[1] + ring[1].nbytes + 2 * unpacked
    return {"int4": ours, "stock": tokens * (2 * RANK + POSITIONAL) * 2}


def run(kind: str, *values: Any, checkout: str | None = None) -> Any:
    """One measurement in a process of its own."""
    command = [sys.executable, str(Path(__file__)), "--one", kind, *map(str, values)]
    paths = [p for p in (checkout, os.environ.get("PYTHONPATH")) if p]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(out.stdout.splitlines()[-1])


def ratio(value: float, of: float) -> str:
    return f"{value / of:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--against", help="Another checkout, to decode with in turns")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        kind, *values = (int(v) if v.isdigit() else v for v in args.one)
        print(json.dumps(MEASURES[kind](*values)))
        return
    if args.against is not None and not (Path(args.against) / "mlx_kivi").is_dir():
        raise SystemExit(f"--against {args.against}: no mlx_kivi in there; give a checkout")

    memory = {n: {name: run("step_memory", n, name) for name in CACHES} for n in (4, 16)}
    peaks = {name: run("process_peak", name, args.tokens) for name in CACHES}
    bytes_read = run("traffic", args.tokens)
    sources = {"this": None} | ({"against": args.against} if args.against else {})
    turns: dict[str, list[dict[str, float]]] = {source: [] for source in sources}
    for _ in range(ROUNDS):
        for source, checkout in sources.items():
            turns[source].append(run("step_time", args.tokens, checkout=checkout))
    times = {
        source: {name: float(np.median([turn[name] for turn in found])) for name in CACHES}
        for source, found in turns.items()
    }

    few, many = memory[4]["int4"], memory[16]["int4"]
    totals = {name: sum(memory[16][name].values()) for name in CACHES}
    mb = 1e6
    rows = [
        ["more memory in a step, int4: 16 layers to 4", f"{many['step'] / mb:.2f} MB"]
        + [f"{few['step'] / mb:.2f} MB", ratio(many["step"], few["step"])],
        [f"held + step, T = {SHORT:,}: int4 to stock"]
        + [f"{totals[name] / mb:.1f} MB" for name in reversed(CACHES)]
        + [ratio(totals["int4"], totals["stock"])],
        [f"process peak, T = {args.tokens:,}: int4 to stock"]
        + [f"{peaks[name] / mb:.0f} MB" for name in reversed(CACHES)]
        + [ratio(peaks["int4"], peaks["stock"])],
        ["bytes of latents in a step, a layer: int4 to stock, float16"]
        + [f"{bytes_read[name] / mb:.2f} MB" for name in reversed(CACHES)]
        + [ratio(bytes_read["int4"], bytes_read["stock"])],
    ]
    pairs = [("stock", times["this"]["stock"])]
    if args.against:
        pairs.append(("int4 of --against", times["against"]["int4"]))
    for label, other in pairs:
        ours = times["this"]["int4"]
        cells = [f"{ours:.1f} ms", f"{other:.1f} ms", ratio(other, ours)]
        rows.append([f"decoded token, 16 heads: int4 to {label}, as speed", *cells])
    table(["what", "this", "that", "ratio"], rows)
    finish(
        "latent",
        tokens=args.tokens,
        step_memory=memory,
        process_peak=peaks,
        traffic=bytes_read,
        milliseconds=times,
    )


MEASURES = {f.__name__: f for f in (step_memory, process_peak, step_time, traffic)}

if __name__ == "__main__":
    main()
