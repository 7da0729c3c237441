"""Reproduces known Mixture-of-Experts failures of vLLM and FlashInfer, applies the fix, and proves it.

Importing this package imports no torch. The fixes are in `moedoctor.fixes`, importable on their own.
"""

__version__ = "0.1.0"
