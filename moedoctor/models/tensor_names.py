"""The names of a checkpoint's tensors, without the numbers of layers and experts."""

import re

OPTIONAL = re.compile(
    r"(?:^|[._])(?:[qkv]|prob)_scale$|zero_point$|g_idx(?:_sort_indices)?$|\.[qkv]_scale_float$"
)
"""Parameters that a sound checkpoint may lack: a release gives them a value of its own."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def name_pattern(name: str) -> str:
    """Return a tensor's name with N in place of each number: the same for all layers and experts."""
    return _NUMBER.sub("N", name)
