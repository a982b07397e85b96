"""Kernels compiled for the A100, whose tiles cards of 8.6, 8.9 and 12.0 have as well."""

from kernel_resources import table

from tests.support.compiled_kernels import assert_fits, compiled, compiled_layer
from tests.support.notes import Note

# A family for each thing that changes a kernel: float32, groups of 7, heads of 256.
OTHERS = [
    "qwen2-0.5b: decode",
    "gemma-2: prefill",
    "float32-64: prefill",
    "float32-128: shared prefix, fixed order",
]


def test_every_variant_of_a_layer_fits(note: Note) -> None:
    rows = compiled_layer(80, "llama-8b")
    assert len(rows) == 22
    note(table(rows))
    assert_fits(rows)


def test_main_variants_of_other_families_fit(note: Note) -> None:
    rows = compiled(80, OTHERS)
    assert len(rows) == len(OTHERS)
    note(table(rows))
    assert_fits(rows)
