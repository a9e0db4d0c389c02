"""Every module in a batch of three rows of unequal length, beside each of the rows alone."""

from __future__ import annotations

import pytest

from conformance.architectures import batches, matrix, models
from conformance.architectures.batches import check


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        (name, "int4 + sinks + window" if name in models.bounded() else "int4")
        for name in models.names()
    ],
)
def test_a_row_in_a_batch_is_the_row_alone_or_what_the_page_says(name: str, policy: str) -> None:
    check(name, policy)


NAMED = {*batches.DEVIATES, *batches.STOCK_DEVIATES, *batches.NONE, *batches.WHOLE_CALL}


# The others when the page is written: half a minute.
@pytest.mark.parametrize("name", sorted(NAMED & set(models.names())))
def test_batches_of_the_stock_caches_deviate_where_the_page_says(name: str) -> None:
    check(name, None)


def test_groups_are_packed_in_prompts_and_in_steps() -> None:
    """Of sinks, the residual and then whole groups."""
    small = matrix.SMALL
    first = small["sink"] + small["residual_length"] + small["group_size"]
    packed = range(first, 200, small["group_size"])
    steps = 0
    for prompts in zip(*batches.PROMPTS, strict=True):
        fed = sum(prompts)
        steps += any(fed < n <= fed + batches.STEPS for n in packed)
    assert steps == 2 and sum(n <= batches.PROMPTS[0][-1] for n in packed) == 1
    assert max(map(sum, zip(*batches.PROMPTS, strict=True))) > 100 + small["sink"]  # evicts
