"""Kernels compiled for the H100 and the H200."""

from kernel_resources import table

from tests.support.compiled_kernels import assert_fits, compiled, compiled_layer
from tests.support.notes import Note

# Heads of 256 with a soft cap, heads of 96 in tiles of 128, a pool in fp8.
OTHERS = [
    "gemma-2: prefill",
    "phi-3-mini: prefill",
    "fp8-pool: decode",
    "fp8-pool: prefill",
    "fp8-pool: store",
]


def test_every_variant_of_a_layer_fits(note: Note) -> None:
    rows = compiled_layer(90, "llama-8b")
    assert len(rows) == 22
    note(table(rows))
    assert_fits(rows)


def test_main_variants_of_other_families_fit(note: Note) -> None:
    rows = compiled(90, OTHERS)
    assert len(rows) == len(OTHERS)
    note(table(rows))
    assert_fits(rows)
