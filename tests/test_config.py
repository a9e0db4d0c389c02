"""The policy: what it accepts, what it says otherwise, and its presets."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_kivi import KVCacheConfig
from mlx_kivi.config import (
    BITS,
    DTYPES,
    GROUP_SIZES,
    PRESETS,
    value_group,
    with_max_kv_size,
)

HEAD_SIZES = (40, 64, 72, 80, 96, 100, 112, 120, 128, 160, 192)

# field, a value that it can't have, what the message says of the mend
BAD = [
    *[("k_bits", v, "2, 3, 4, 5, 6, 8, or None") for v in (0, 1, 7, 9, 16, -4, True, 4.0, "4")],
    *[("v_bits", v, "2, 3, 4, 5, 6, 8, or None") for v in (0, 1, 7, 9, 16, -4, True, 4.0, "4")],
    *[("group_size", v, "32, 64, 128") for v in (0, 16, 48, 256, -32, None, 64.0, "64")],
    *[("residual_length", v, "at least 0") for v in (-1, None, 1.5, True, "8")],
    *[("sink", v, "at least 0") for v in (-1, None, 1.5, True, "4")],
    *[("window", v, "at least 1 (or None to keep every token)") for v in (0, -1, 2.0, True, "9")],
    *[("dtype", v, ", ".join(DTYPES)) for v in ("int8", "fp16", 16, mx.float16)],
    *[("protect_first", v, "at least 0") for v in (-1, None, 0.5, True)],
    *[("protect_last", v, "at least 0") for v in (-1, None, 0.5, True)],
    *[("balanced", v, "True or False") for v in (0, 1, None, "yes")],
    *[("layers", v, "whole numbers, or None") for v in (3, "12", (0.5,), (None,))],
]


@pytest.mark.parametrize(("field", "value", "mend"), BAD)
def test_a_bad_field_is_named_with_its_value_and_the_mend(
    field: str, value: Any, mend: str
) -> None:
    with pytest.raises(ValueError) as caught:
        KVCacheConfig(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"{field}=") and mend in message
    assert "\n" not in message


@pytest.mark.parametrize("bits", [*BITS, None])
@pytest.mark.parametrize("group", GROUP_SIZES)
def test_every_legal_value_is_accepted(bits: int | None, group: int) -> None:
    for dtype in (*DTYPES, None):
        config = KVCacheConfig(
            k_bits=bits, v_bits=None, group_size=group, residual_length=0, sink=0, window=1,
            dtype=dtype, layers=[0, -1],
        )  # fmt: skip
        assert config.quantized is (bits is not None)
        assert config.layers == (0, -1)


def test_a_policy_cannot_be_changed_in_place() -> None:
    config = KVCacheConfig()
    with pytest.raises(AttributeError):
        config.sink = 8
    changed = config.replace(sink=8)
    assert (config.sink, changed.sink) == (4, 8)
    with pytest.raises(ValueError, match="^sink=-8"):
        config.replace(sink=-8)


def test_a_policy_survives_its_dictionary_and_is_hashable() -> None:
    config = KVCacheConfig(k_bits=3, v_bits=8, layers=(0, 2), window=100, dtype="bfloat16")
    assert KVCacheConfig(**config.to_dict()) == config
    assert len({config, config.replace(), config.replace(sink=5)}) == 2


# Presets


@pytest.mark.parametrize(
    ("name", "v_bits", "dtype"),
    [
        ("none", None, None),
        ("fp16", None, "float16"),
        ("bf16", None, "bfloat16"),
        ("int8", 8, None),
        ("int4", 4, None),
        ("int3", 3, None),
        ("int2", 2, None),
        ("int2s", 2, None),
        ("kivi4", 4, None),
        ("kivi2", 2, None),
    ],
)
def test_presets_hold_what_their_names_say(
    name: str, v_bits: int | None, dtype: str | None
) -> None:
    config = KVCacheConfig.from_name(name)
    assert config.v_bits == v_bits and config.dtype == dtype
    # Keys matter more: those of int2 have 3 bits.
    assert config.k_bits == (3 if name == "int2" else v_bits)
    assert config.quantized is (v_bits is not None)
    assert config.window is None


def test_every_preset_has_a_test_and_its_own_policy() -> None:
    assert list(PRESETS) == "none fp16 bf16 int8 int4 int3 int2 int2s kivi4 kivi2".split()
    assert len({KVCacheConfig.from_name(name) for name in PRESETS}) == len(PRESETS)


@pytest.mark.parametrize(
    ("name", "keys", "values"),
    [
        ("none", False, False),
        ("int8", False, False),
        ("int4", True, True),
        ("int3", True, True),
        ("int2", True, True),
        ("kivi4", False, False),
        ("kivi2", False, False),
    ],
)
def test_fewer_than_eight_bits_take_another_basis_but_for_kivis(
    name: str, keys: bool, values: bool
) -> None:
    config = KVCacheConfig.from_name(name)
    assert (config.moves_keys, config.moves_values) == (keys, values)
    assert config.balanced is not name.startswith("kivi")
    plain = config.replace(balanced=False)
    assert not plain.moves_keys and not plain.moves_values
    one = KVCacheConfig(k_bits=8, v_bits=6)
    assert (one.moves_keys, one.moves_values) == (False, True)


@pytest.mark.parametrize(("name", "head_dim", "bits"), [("int4", 64, 4.5), ("int3", 64, 3.5),
    ("int2", 64, 2.9), ("kivi4", 128, 4.5), ("kivi2", 128, 3.0), ("int2", 128, 2.9)])  # fmt: skip
def test_presets_take_no_more_bits_a_packed_value_than_their_names_promise(
    name: str, head_dim: int, bits: float
) -> None:
    config = KVCacheConfig.from_name(name)
    group, padded = value_group(head_dim, config.group_size, config.v_bits)
    values = padded * (config.v_bits + 32 / group) / head_dim
    assert (config.k_bits + 32 / config.group_size + values) / 2 <= bits


def test_fields_given_beside_a_preset_win() -> None:
    config = KVCacheConfig.from_name("int4", sink=2, window=1024, v_bits=None)
    assert (config.k_bits, config.v_bits, config.sink, config.window) == (4, None, 2, 1024)
    with pytest.raises(ValueError, match="^window=0: "):
        KVCacheConfig.from_name("int4", window=0)


@pytest.mark.parametrize("name", ["int5", "INT4", "", "q4_0"])
def test_an_unknown_preset_lists_those_that_exist(name: str) -> None:
    with pytest.raises(ValueError) as caught:
        KVCacheConfig.from_name(name)
    assert repr(name) in str(caught.value)
    assert ", ".join(PRESETS) in str(caught.value)


# Layers


def test_layers_outside_the_list_keep_the_bounds_and_full_precision() -> None:
    config = KVCacheConfig.from_name("int4", layers=(1, -1), window=50, sink=2)
    policies = config.by_layer(4)
    assert [p.k_bits for p in policies] == [None, 4, None, 4]
    assert {(p.window, p.sink) for p in policies} == {(50, 2)}


def test_protected_layers_take_eight_bits_at_least() -> None:
    config = KVCacheConfig(k_bits=3, v_bits=None, protect_first=1, protect_last=2)
    policies = config.by_layer(5)
    assert [p.k_bits for p in policies] == [8, 3, 3, 8, 8]
    assert {p.v_bits for p in policies} == {None}


def test_layers_that_a_model_does_not_have_are_named() -> None:
    for bad in (4, -5):
        with pytest.raises(ValueError, match=f"^layers={bad}: .*0 to 3"):
            KVCacheConfig(layers=(0, bad)).by_layer(4)


def test_no_layers_at_all_quantise_nothing() -> None:
    assert not any(p.quantized for p in KVCacheConfig.from_name("int2", layers=()).by_layer(3))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (KVCacheConfig(), ["full precision", "sinks 4", "no window"]),
        (KVCacheConfig.from_name("fp16"), ["float16"]),
        (KVCacheConfig.from_name("int4", window=99), ["4 bits", "group 64", "window 99"]),
        (KVCacheConfig(k_bits=4, v_bits=2), ["keys 4", "values 2", "residual 32"]),
        (KVCacheConfig(k_bits=8), ["keys 8", "values full"]),
    ],
)
def test_describe_says_what_is_in_force(config: KVCacheConfig, words: list[str]) -> None:
    line = config.describe()
    assert "\n" not in line
    for word in words:
        assert word in line


# Groups of values


@pytest.mark.parametrize("head_dim", HEAD_SIZES)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_value_groups_are_legal_and_the_cheapest(head_dim: int, group_size: int, bits: int) -> None:
    def cost(group: int, padded: int) -> float:
        return padded * bits + padded // group * 32  # a scale and a zero of 16 bits

    group, padded = value_group(head_dim, group_size, bits)
    assert group in GROUP_SIZES and group <= group_size
    assert padded % group == 0 and head_dim <= padded < head_dim + group
    others = [g for g in GROUP_SIZES if g <= group_size]
    assert cost(group, padded) == min(cost(g, -(-head_dim // g) * g) for g in others)
    mx.eval(mx.quantized_matmul(
        mx.ones((1, 32)), *mx.quantize(mx.ones((32, padded)), group, bits),
        transpose=False, group_size=group, bits=bits,
    ))  # fmt: skip


@pytest.mark.parametrize("head_dim", [d for d in HEAD_SIZES if d % 64 == 0])
def test_int4_costs_four_and_a_half_bits_a_packed_value(head_dim: int) -> None:
    config = KVCacheConfig.from_name("int4")
    group, padded = value_group(head_dim, config.group_size, config.v_bits)
    assert padded * (config.v_bits + 32 / group) / head_dim <= 4.5
    assert config.k_bits + 32 / config.group_size <= 4.5


def test_max_kv_size_is_sinks_and_window_together() -> None:
    config = KVCacheConfig.from_name("int4", sink=6)
    assert with_max_kv_size(config, None) == config
    assert with_max_kv_size(config, 7).window == 1
    with pytest.raises(ValueError, match="^max_kv_size=6: .*more than the 6 sinks"):
        with_max_kv_size(config, 6)
    with pytest.raises(ValueError, match="max_kv_size=9 and window=5"):
        with_max_kv_size(config.replace(window=5), 9)
