"""Quantised: what is stored, that the logits are those of the stored numbers, and the way there.

Never compared with the model unquantised: the noise tips the routers of a mixture of experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mlx_lm.models.cache import KVCache

import mlx_kivi
from conformance import report
from conformance.architectures import matrix, models
from conformance.architectures.reference import flat, pair_up, reference_caches
from mlx_kivi.models.architectures import DENSE, INDEXED, LATENT, PACKED
from mlx_kivi.models.latent_caches import LatentCache

CHECKED_AT = (110, 118, 163, sum(matrix.CALLS))  # tokens; none right after a call that was cut
# With mlx-lm 0.31 other code of models is tested, not other bits.
OTHER_BITS = ("int8", "int2") if hasattr(KVCache, "keys_and_values") else ()


@pytest.fixture
def reads() -> Iterator[matrix.Reads]:
    with matrix.counted() as reads:
        yield reads


@pytest.mark.parametrize(
    ("name", "policy"),
    [(name, policy) for name in models.names() for policy in OTHER_BITS]
    + [
        (name, "int4 + sinks + window" if name in models.bounded() else "int4")
        for name in models.names()
    ],
)
def test_quantized_equals_dense_attention_on_what_is_stored(name: str, policy: str) -> None:
    model, config = models.build(name), matrix.POLICIES[policy]
    ours, theirs = mlx_kivi.make_prompt_cache(model, config), reference_caches(model, config)
    references = pair_up(theirs, ours)
    run = matrix.compare(
        model,
        ours,
        theirs if references else None,
        matrix.TOLERANCE_PACKED,
        splits=name not in DENSE,
    )
    for fed in run:
        if fed not in CHECKED_AT:
            continue
        for reference in references:
            loose, packed = reference.errors()
            assert all(error.item() < matrix.TOLERANCE_PACKED for error in loose)
            assert all(error.item() <= 1 for error in packed)
    packing = [ref.twin for ref in references if ref.twin.plan.residual is not None]
    assert all(twin.packed_tokens >= 2 * config.group_size for twin in packing)
    # Only a window that the model was trained with may be too small to pay.
    assert all(r.twin in packing or r.window not in (None, config.window) for r in references)


@pytest.mark.parametrize("name", models.names())
def test_attention_reads_packed_data_or_arrays_as_the_table_says(
    name: str, reads: matrix.Reads
) -> None:
    model = models.build(name)
    caches = mlx_kivi.make_prompt_cache(model, matrix.POLICIES["int4 + sinks + window"])
    ours = [c for c in flat(caches) if isinstance(c, mlx_kivi.QuantizedStreamingCache)]
    # Keys are in the basis that the page says.
    assert report.bases(caches) == (report.rows_of_the_page()[name][2] if ours else "")
    *prompt, token = matrix.parts()[:5]
    for part in prompt:
        matrix.logits(model, part, caches)
    reads.packed = reads.dense = reads.latent = 0
    matrix.logits(model, token, caches)
    latent = sum(isinstance(c, LatentCache) for c in ours) if name not in INDEXED else 0
    if name in DENSE:
        assert reads.packed == 0 and reads.latent == latent
        assert (name in LATENT) == any(isinstance(c, LatentCache) for c in ours)
        assert reads.dense >= 2 * (len(ours) - latent) and len(ours) > 0
    else:
        assert reads.packed >= len(ours) and reads.dense == 0


def test_at_least_100_modules_of_126_are_read_packed() -> None:
    """The count that the test above shows one by one; gear's settings decide, plain here."""
    assert len(models.CONFIGS) == 126
    assert len(PACKED & set(models.CONFIGS)) >= 100


@pytest.mark.parametrize("name", sorted(INDEXED & set(models.names())))
def test_an_indexer_evicts_in_lockstep_with_its_main_cache(name: str) -> None:
    model = models.build(name)
    caches = mlx_kivi.make_prompt_cache(model, matrix.POLICIES["int4 + sinks + window"])
    pairs = [c.caches for c in caches if len(c.caches) == 2]
    assert pairs
    for part in matrix.parts():
        matrix.logits(model, part, caches)
        for main, indexer in pairs:
            assert main.offset == indexer.offset and main.size() == indexer.size()
            assert main.packed_tokens == indexer.packed_tokens
            assert main.keys_and_values()[0].shape[2] == indexer.keys_and_values()[0].shape[2]
    for main, indexer in pairs:
        assert main.config.k_bits == 4 and indexer.config.k_bits == 8
