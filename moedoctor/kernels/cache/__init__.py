"""Kernels of the expert cache: lookup, eviction and copies. This file is importable without Triton."""

HALVED_EVERY = 48
"""The policy `aging` halves its counts after this many calls."""
EVERY_ROW = 0x7FFFFFFF
"""More rows than a call can have."""
WHOLE_SHARE = 256
"""A share of all missing experts, as kernels take shares."""
