"""The GPU's kernels, in Triton; the interpreter runs them on CPU tensors (TRITON_INTERPRET=1)."""
