"""Runs checks of `id_and_watch_calls` in Triton's interpreter, on the CPU; a script for `test_expert_ids`."""

from __future__ import annotations

import os
import sys
import warnings

os.environ["TRITON_INTERPRET"] = "1"
warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy's, about NaN

from id_and_watch_calls import CHECKS  # noqa: E402

if __name__ == "__main__":
    for name in sys.argv[1:]:
        CHECKS[name]("cpu")
