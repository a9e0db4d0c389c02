"""Multi-head latent attention: memory of a step, of a whole run, and time of a decoded token.

A random DeepSeek-V3 with the real sizes of latents (rank 512, 64 rotated channels) and little else,
in float32. int4 against mlx-lm's own caches:

- what a decode step needs beside what is held, in 4 layers and in 16;
- the peak of a process that feeds a prompt in steps of 512 and decodes 16 tokens;
- milliseconds of a token, also against another checkout of this package;
- bytes of latents that a step reads and writes in 16 bits, from shapes: words twice; 16-bit scales
  and zeros once, as float32 written once and read twice; stock: latents twice. The positional part,
  64 of 576 channels, is not counted.

    python benchmarks/latent.py [--tokens 8192] [--heads 16] [--against DIR]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from common import finish, table
from memory import resident
from mlx_lm.models import cache as mlx_caches
from mlx_lm.models import deepseek_v3

import mlx_kivi

RANK, ROPE, STEP = 512, 64, 512
INT4 = mlx_kivi.KVCacheConfig.from_name("int4")


def build(layers: int, heads: int) -> Any:
    mx.random.seed(0)
    settings = deepseek_v3.ModelArgs(
        model_type="deepseek_v3", vocab_size=64, hidden_size=64, intermediate_size=64,
        moe_intermediate_size=64, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, n_routed_experts=None, q_lora_rank=16, kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE, qk_nope_head_dim=32, v_head_dim=32, rope_scaling=None,
    )  # fmt: skip
    model = deepseek_v3.Model(settings)
    mx.eval(model.parameters())
    return model


def caches(model: Any, name: str) -> list[Any]:
    if name == "stock":
        return mlx_caches.make_prompt_cache(model)
    return mlx_kivi.make_prompt_cache(model, INT4)


def feed(model: Any, cache: list[Any], count: int) -> None:
    mx.eval(model(mx.zeros((1, count), mx.int32), cache=cache), [c.state for c in cache])


def step_memory(name: str, layers: int, tokens: int) -> dict[str, int]:
    """Bytes that the caches hold, and the peak of a decode step above all that is held."""
    model = build(layers, heads=2)
    cache = caches(model, name)
    for count in (*[256] * (tokens // 256), 1, 1):
        feed(model, cache, count)
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(model(mx.zeros((1, 1), mx.int32), cache=cache))
    more = mx.get_peak_memory() - before
    return {"held": sum(c.nbytes for c in cache), "step": more}


def process_peak(name: str, layers: int, tokens: int) -> int:
    """Resident bytes of this process at the most, above those before the prompt."""
    model = build(layers, heads=2)
    feed(model, caches(model, name), STEP)  # what the first use of anything costs
    before = resident()
    cache = caches(model, name)
    for count in (*[STEP] * (tokens // STEP), *[1] * 16):
        feed(model, cache, count)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1024 if sys.platform == "linux" else 1) - before


def token_time(name: str, heads: int, tokens: int) -> float:
    """Median milliseconds of a decoded token, 4 layers."""
    model = build(4, heads)
    cache = caches(model, name)
    for layer in cache:
        for _ in range(tokens // STEP):
            latents, rope = (mx.random.normal((1, 1, STEP, d)) for d in (RANK, ROPE))
            layer.update_and_fetch(latents, rope)
            mx.eval(layer.state)
    times = []
    for _ in range(24):
        start = time.perf_counter()
        mx.eval(model(mx.zeros((1, 1), mx.int32), cache=cache))
        times.append((time.perf_counter() - start) * 1e3)
    return float(np.median(times[4:]))


def traffic() -> float:
    """Bytes of latents read and written a step and token, int4 against stock float16."""
    pair = 2 * 2 + 2 * 4 + 2 * 2 * 4  # of a group and channel: 16 bits read, float32 there and back
    return (2 * INT4.k_bits / 8 + pair / INT4.group_size) / (2 * 2)


def alone(what: str, name: str, args: argparse.Namespace, against: str | None = None) -> float:
    """A measurement in a process of its own, with this checkout or another."""
    command = [sys.executable, str(Path(__file__).resolve()), "--one", what, name]
    command += ["--tokens", str(args.tokens), "--heads", str(args.heads)]
    root = Path(against) if against else Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root.resolve())}
    out = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, env=environment
    ).stdout
    return json.loads(out.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="Default: 8192")
    parser.add_argument("--heads", type=int, default=16, help="Query heads. Default: 16")
    parser.add_argument("--rounds", type=int, default=3, help="Of each timing. Default: 3")
    parser.add_argument("--against", metavar="DIR", help="Another checkout to time. Default: none")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.against and not (Path(args.against) / "mlx_kivi").is_dir():
        parser.error(f"--against {args.against}: no checkout of mlx_kivi there")
    if args.one:
        what, name = args.one
        run = {"peak": lambda: process_peak(name, 16, args.tokens)}
        run["time"] = lambda: token_time(name, args.heads, args.tokens)
        print(json.dumps(run[what]()))
        return
    steps = {
        (name, layers): step_memory(name, layers, 1024)
        for name in ("stock", "int4")
        for layers in (4, 16)
    }
    peaks = {name: alone("peak", name, args) for name in ("stock", "int4")}
    kinds = {"stock": ("stock", None), "int4": ("int4", None)}
    if args.against:
        kinds["int4 there"] = ("int4", args.against)
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(args.rounds):
        for kind, (name, there) in kinds.items():
            times[kind].append(alone("time", name, args, there))
    ours, theirs = (sum(steps[name, 16].values()) for name in ("int4", "stock"))
    medians = {kind: float(np.median(t)) for kind, t in times.items()}
    figures = {
        "more in a step, 16 layers against 4": steps["int4", 16]["step"] / steps["int4", 4]["step"],
        "held and step, 16 layers, against stock": ours / theirs,
        "process peak against stock": peaks["int4"] / peaks["stock"],
        "latents read and written against stock float16": traffic(),
        **{f"speed against {k}": medians[k] / medians["int4"] for k in medians if k != "int4"},
    }
    table(["int4", "ratio"], [[name, f"{ratio:.2f}"] for name, ratio in figures.items()])
    for (name, layers), found in steps.items():
        held, more = (found[k] / 1e6 for k in ("held", "step"))
        print(f"{name}, {layers} layers: {held:.1f} MB held, {more:.1f} MB more in a step")
    print("process peaks:", ", ".join(f"{k} {v / 1e6:.0f} MB" for k, v in peaks.items()))
    print("milliseconds a token:", ", ".join(f"{k} {v:.1f}" for k, v in medians.items()))
    finish("latent", tokens=args.tokens, heads=args.heads, ratios=figures, milliseconds=medians)


if __name__ == "__main__":
    main()
