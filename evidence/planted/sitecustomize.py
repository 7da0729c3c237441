"""The fault of `crash_engines.py` in processes that compute a call again; they have no MOEDOCTOR_RECORD."""

import importlib.abc
import importlib.util
import os
import sys

_NAME = "vllm.model_executor.layers.fused_moe.experts.triton_moe"


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):  # type: ignore[no-untyped-def]
        if name != _NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            from crash_engines import plant_far_ids

            run(module)
            plant_far_ids(module, None)

        spec.loader.exec_module = exec_module
        return spec


if not os.environ.get("MOEDOCTOR_RECORD"):
    sys.meta_path.insert(0, _Finder())
