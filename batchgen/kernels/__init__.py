"""Functions of tensors only: what a step does to the KV pool."""
