"""The cache policy on the command line: flags, and messages that name them."""

from __future__ import annotations

import argparse
import re
from typing import Any

from ..config import BITS, PRESETS, KVCacheConfig, listed, with_max_kv_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the cache's own flags. ``--kv-group-size`` and ``--max-kv-size`` are mlx_lm's."""
    flags = parser.add_argument_group("KV cache (mlx_kivi)")
    flags.add_argument(
        "--kv-quantize",
        metavar="NAME",
        help=f"Storage of the KV cache: {listed(PRESETS)}. Default: none",
    )
    flags.add_argument(
        "--kv-key-bits", type=int, metavar="BITS", help=f"Bits for keys: {listed(BITS)}"
    )
    flags.add_argument(
        "--kv-value-bits", type=int, metavar="BITS", help=f"Bits for values: {listed(BITS)}"
    )
    flags.add_argument(
        "--kv-residual",
        type=int,
        metavar="N",
        help="Most recent tokens kept in full precision. Default: 64 for int4, int3, "
        "int2, int2s and kivi4, else 32",
    )
    flags.add_argument(
        "--streaming-llm-sink",
        type=int,
        metavar="N",
        help="First tokens that are always kept. Default: 4",
    )
    flags.add_argument(
        "--streaming-llm-window",
        type=int,
        metavar="M",
        help="Keep only the last M tokens beside the sinks. Default: keep all",
    )
    flags.add_argument(
        "--streaming-llm-reposition",
        action="store_true",
        help="Let sinks move along, next to the window, as in the StreamingLLM paper",
    )


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """What flags of ours give: fields of the policy, and the ``name`` that --kv-quantize names."""
    given = {
        "name": args.kv_quantize,
        "k_bits": args.kv_key_bits,
        "v_bits": args.kv_value_bits,
        "residual_length": args.kv_residual,
        "sink": args.streaming_llm_sink,
        "window": args.streaming_llm_window,
        "reposition": args.streaming_llm_reposition or None,
    }
    return {field: value for field, value in given.items() if value is not None}


def from_arguments(args: argparse.Namespace, group_size: int | None) -> KVCacheConfig | None:
    """The policy that the flags ask for; None if neither a flag of ours nor a bound was given.

    Args:
        args: What a parser with `add_arguments` and mlx_lm's own flags returned.
        group_size: ``--kv-group-size`` if the user gave it.

    Raises:
        ValueError: one line that names the flag and the mend.
    """
    given, size = asked(args), args.max_kv_size
    if not given and size is None:
        return None
    bits = getattr(args, "kv_bits", None)
    if bits is not None and given:
        raise ValueError(
            "--kv-bits is mlx_lm's own cache and excludes the flags of this one: use --kv-quantize"
        )
    if bits is not None:
        raise ValueError(
            f"--kv-bits {bits} is mlx_lm's own cache, which --max-kv-size {size} can't bound: use "
            "--kv-quantize NAME with --max-kv-size"
        )
    if "window" in given and size is not None:
        raise ValueError("--max-kv-size and --streaming-llm-window both bound the cache: use one")
    bounded = "window" in given or size is not None
    if "sink" in given and not bounded:
        raise ValueError("--streaming-llm-sink needs --streaming-llm-window M")
    if "reposition" in given and not bounded:
        raise ValueError("--streaming-llm-reposition needs --streaming-llm-window M")
    if group_size is not None:
        given["group_size"] = group_size
    try:
        config = KVCacheConfig.from_name(given.pop("name", "none"), **given)
    except ValueError as error:
        raise ValueError(in_flags(str(error))) from None
    if "residual_length" in given and not config.quantized:
        raise ValueError("--kv-residual is for packed caches: add --kv-quantize NAME")
    try:
        return with_max_kv_size(config, size)
    except ValueError as error:
        raise ValueError(str(error).replace("max_kv_size=", "--max-kv-size ")) from None


_FLAGS = {
    "k_bits": "--kv-key-bits",
    "v_bits": "--kv-value-bits",
    "group_size": "--kv-group-size",
    "residual_length": "--kv-residual",
    "sink": "--streaming-llm-sink",
    "window": "--streaming-llm-window",
}
# Words of their own: "window=30", but not where it is part of a path.
_SETTINGS = re.compile(rf"(?<!\S)({'|'.join(_FLAGS)})=([\w.-]+)(?=[\s,:;]|$)")


def in_flags(message: str) -> str:
    """A message about fields of a policy, with the flags in their place."""

    def flag(found: re.Match[str]) -> str:
        name, value = _FLAGS[found[1]], found[2]
        return f"no {name}" if value == "None" else f"{name} {value}"

    message = re.sub("^kv-quantize ", "--kv-quantize ", _SETTINGS.sub(flag, message))
    message = message.replace(", or None", "").replace("or None to", "or leave it out to")
    message = message.replace("reposition=True", "--streaming-llm-reposition")
    return message
