"""Kernels compiled for the B200."""

from kernel_resources import table

from tests.support.compiled_kernels import assert_fits, compiled, compiled_layer
from tests.support.notes import Note

# Sinks and a window, heads of 64, heads of 256, a pool in fp8.
OTHERS = [
    "gpt-oss window: decode",
    "gpt-oss: prefill",
    "gemma-2: prefill",
    "fp8-pool: shared prefix",
]


def test_every_variant_of_a_layer_fits(note: Note) -> None:
    rows = compiled_layer(100, "llama-8b")
    assert len(rows) == 22
    note(table(rows))
    assert_fits(rows)


def test_main_variants_of_other_families_fit(note: Note) -> None:
    rows = compiled(100, OTHERS)
    assert len(rows) == len(OTHERS)
    note(table(rows))
    assert_fits(rows)
