"""The names of a checkpoint's tensors, without the numbers of layers and experts."""

import re

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def name_pattern(name: str) -> str:
    """Return a tensor's name with N in place of each number: the same for all layers and experts."""
    return _NUMBER.sub("N", name)
