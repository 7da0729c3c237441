"""Why a kernel does not take a layer, in words."""

from __future__ import annotations

from moedoctor.fixes.backends.release_tables import CAPABILITIES, Kernel, Point, Values

PREDICATES = ("device", "gate", "activation", "scheme", "parallel", "format")
"""In the order in which vLLM asks."""

_ELSEWHERE = (("AITER", "ROCm"), ("ROCM", "ROCm"), ("CK", "ROCm"), ("XPU", "Intel GPUs"), ("CPU", "CPUs"))
_SETTINGS = {
    "tp": "tensor parallelism alone",
    "ep": "expert parallelism",
    "dp": "data parallelism",
    "dp+ep": "data and expert parallelism together",
}


def explain(kind: str, kernel: Kernel, point: Point, scheme: str) -> str:
    """The sentence for a predicate of `PREDICATES` that fails at `point`."""
    capability, parallel, activation = point
    if kind == "device":
        platform = next((name for mark, name in _ELSEWHERE if kernel.backend.upper().startswith(mark)), None)
        if not kernel.devices:
            return f"for {platform} only" if platform else "has no kernel for any NVIDIA GPU here"
        return f"has no kernel for compute capability {capability}, only for {spoken(kernel.devices)}"
    if kind == "gate":
        return f"takes no layers without a gate ({activation})"
    if kind == "activation":
        return f"does not compute {activation}, only {', '.join(sorted(kernel.activations or ()))}"
    if kind == "scheme":
        if not kernel.scheme_devices:
            return f"does not take {scheme}"
        return f"takes {scheme} on {spoken(kernel.scheme_devices)} only"
    if kind == "parallel":
        return f"does not work with {_SETTINGS[parallel]}"
    return "needs the batched activation format, which comes with --all2all-backend deepep_low_latency"


def spoken(capabilities: Values) -> str:
    """Capabilities in words: ``10.0 to 10.7``, ``9.0 and 12.0``, ``7.5 and newer``."""
    if capabilities is None:
        return "every capability"
    known = [one for one in CAPABILITIES if one in capabilities]
    if known and known == list(CAPABILITIES[CAPABILITIES.index(known[0]) :]) and len(known) > 2:
        return f"{known[0]} and newer"
    runs: list[list[str]] = []
    for one in known:
        if runs and CAPABILITIES.index(one) == CAPABILITIES.index(runs[-1][-1]) + 1:
            runs[-1].append(one)
        else:
            runs.append([one])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else " and ".join(run) for run in runs]
    return ", ".join(parts)
