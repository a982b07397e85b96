"""The parts of gpu_check.py. They import torch, triton, transformers, numpy and this checkout."""
