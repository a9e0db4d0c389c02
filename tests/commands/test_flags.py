"""The policy that flags give, and what is said of bad ones."""

import argparse

import pytest

from mlx_kivi import KVCacheConfig
from mlx_kivi.commands.flags import add_arguments, from_arguments, in_flags
from mlx_kivi.config import PRESETS


def flags(*argv: str) -> KVCacheConfig | None:
    """The policy of a command line, with the flags of mlx_lm that meet ours."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--kv-bits", type=int)
    parser.add_argument("--kv-group-size", type=int)
    parser.add_argument("--max-kv-size", type=int)
    add_arguments(parser)
    args = parser.parse_args(argv)
    return from_arguments(args, args.kv_group_size)


def test_without_a_flag_of_ours_there_is_no_policy() -> None:
    assert flags() is None
    assert flags("--kv-bits", "4", "--kv-group-size", "32") is None


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        *[(f"--kv-quantize {name}", KVCacheConfig.from_name(name)) for name in PRESETS],
        ("--kv-quantize kivi2", KVCacheConfig(2, 2, group_size=32, balanced=False)),
        (
            "--kv-quantize kivi4 --kv-value-bits 2",
            KVCacheConfig(4, 2, group_size=64, residual_length=64, balanced=False),
        ),
        ("--kv-key-bits 8", KVCacheConfig(k_bits=8)),
        ("--kv-key-bits 8 --kv-value-bits 2", KVCacheConfig(k_bits=8, v_bits=2)),
        (
            "--kv-quantize int4 --kv-value-bits 2 --kv-residual 0 --kv-group-size 32",
            KVCacheConfig(k_bits=4, v_bits=2, residual_length=0, group_size=32),
        ),
        (
            "--kv-quantize int8 --streaming-llm-window 1024",
            KVCacheConfig.from_name("int8", window=1024),
        ),
        (
            "--streaming-llm-window 100 --streaming-llm-sink 0",
            KVCacheConfig(window=100, sink=0),
        ),
        ("--max-kv-size 104", KVCacheConfig(window=100)),
        ("--kv-quantize int2 --max-kv-size 104", KVCacheConfig.from_name("int2", window=100)),
        (
            "--kv-quantize int2 --max-kv-size 104 --streaming-llm-sink 8",
            KVCacheConfig.from_name("int2", window=96, sink=8),
        ),
    ],
)
def test_flags_give_the_policy_they_name(argv: str, expected: KVCacheConfig) -> None:
    assert flags(*argv.split()) == expected


@pytest.mark.parametrize(
    ("argv", "flag", "mend"),
    [
        ("--kv-quantize int5", "--kv-quantize", ", ".join(PRESETS)),
        ("--kv-quantize 4", "--kv-quantize", ", ".join(PRESETS)),
        ("--kv-key-bits 7", "--kv-key-bits 7", "2, 3, 4, 5, 6, 8"),
        ("--kv-key-bits 0", "--kv-key-bits 0", "2, 3, 4, 5, 6, 8"),
        ("--kv-quantize int4 --kv-value-bits -4", "--kv-value-bits -4", "2, 3, 4, 5, 6, 8"),
        ("--kv-quantize int4 --kv-group-size 48", "--kv-group-size 48", "32, 64, 128"),
        ("--kv-quantize int4 --kv-residual -1", "--kv-residual -1", "at least 0"),
        ("--streaming-llm-window 0", "--streaming-llm-window 0", "at least 1"),
        ("--streaming-llm-window -5", "--streaming-llm-window -5", "at least 1"),
        (
            "--streaming-llm-window 9 --streaming-llm-sink -1",
            "--streaming-llm-sink -1",
            "at least 0",
        ),
        ("--streaming-llm-sink 4", "--streaming-llm-sink", "--streaming-llm-window"),
        ("--kv-quantize int4 --streaming-llm-sink 0", "--streaming-llm-sink", "window"),
        ("--kv-quantize int4 --kv-bits 4", "--kv-bits", "--kv-quantize"),
        ("--streaming-llm-window 9 --kv-bits 4", "--kv-bits", "--kv-quantize"),
        (
            "--streaming-llm-window 9 --max-kv-size 99",
            "--max-kv-size and --streaming-llm-window",
            "use one",
        ),
        ("--max-kv-size 99 --kv-bits 4", "--kv-bits 4", "--kv-quantize NAME with --max-kv-size"),
        ("--max-kv-size 99 --kv-bits 4", "--max-kv-size 99", "--kv-quantize NAME"),
        ("--max-kv-size 4", "--max-kv-size 4", "more than the 4 sinks"),
        ("--max-kv-size 0", "--max-kv-size 0", "more than the 4 sinks"),
        ("--max-kv-size 99 --kv-residual 8", "--kv-residual", "--kv-quantize"),
        ("--kv-quantize int4 --max-kv-size 4", "--max-kv-size 4", "more than the 4 sinks"),
        ("--kv-quantize int4 --max-kv-size 0", "--max-kv-size 0", "more than the 4 sinks"),
        ("--kv-quantize int4 --max-kv-size -9", "--max-kv-size -9", "more than the 4 sinks"),
    ],
)
def test_a_bad_flag_is_named_in_one_line(argv: str, flag: str, mend: str) -> None:
    with pytest.raises(ValueError) as caught:
        flags(*argv.split())
    message = str(caught.value)
    assert flag in message and mend in message
    assert "\n" not in message
    # In words of the command line: no field of the class, no None.
    assert "None" not in message
    for field in ("k_bits", "v_bits", "group_size", "residual_length", "max_kv_size", "window="):
        assert field not in message


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("window=30 and sink=4: use window=9", "--streaming-llm-window 30 and "),
        ("use window=9 or less", "use --streaming-llm-window 9 or less"),
        ("with k_bits=4 (layer 0), the flags give k_bits=None:", "give no --kv-key-bits:"),
        ("runs/window=30/a: no such file", "runs/window=30/a: no such file"),
        ("window=30/a: no such file", "window=30/a: no such file"),
    ],
)
def test_messages_about_settings_name_flags_and_leave_paths_alone(message: str, said: str) -> None:
    assert said in in_flags(message)
