"""Kernels in C for the CPU, compiled for the machine at hand when they are first needed."""
