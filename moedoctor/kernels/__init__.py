"""Triton kernels, one file an operation."""
