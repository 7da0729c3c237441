"""Asks one importable vLLM release for everything that the backend tables are made of; prints JSON.

The release's sources (an unpacked wheel) are on PYTHONPATH, together with the FlashInfer and Humming that it
pins. No GPU is used: see `moedoctor.upstream.selection.substitute`.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Sequence
from typing import Any, get_args
from unittest.mock import patch

from moedoctor.fixes.backends import release_tables
from moedoctor.fixes.backends.release_tables import PARALLEL, SCHEMES
from moedoctor.upstream.selection.oracle import Answer, Layer, Oracle
from moedoctor.upstream.selection.substitute import LIBRARIES

CAPABILITIES = tuple(tuple(map(int, name.split("."))) for name in release_tables.CAPABILITIES)

USES = ("FP4", "FP8", "FP16", "MXFP4_BF16", "MXFP4_MXFP8", "MXFP4_MXFP8_CUTLASS")
CHOICES = ("throughput", "latency", "masked_gemm")
ENVIRONMENTS: tuple[dict[str, str], ...] = (
    *({f"VLLM_USE_FLASHINFER_MOE_{use}": value} for use in USES for value in "01"),
    *(
        {f"VLLM_USE_FLASHINFER_MOE_{use}": "1", "VLLM_FLASHINFER_MOE_BACKEND": choice}
        for use in USES[:3]
        for choice in CHOICES
    ),
    *({"VLLM_FLASHINFER_MOE_BACKEND": choice} for choice in CHOICES),
    *({name: value} for name in ("VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM") for value in "01"),
    *({name: "1"} for name in ("VLLM_TEST_FORCE_FP8_MARLIN", "VLLM_MXFP4_USE_MARLIN")),
    {"VLLM_MXFP4_USE_MARLIN": "0"},
    {"VLLM_USE_FLASHINFER_MOE_FP4": "0", "VLLM_TEST_FORCE_FP8_MARLIN": "1"},
    {"VLLM_USE_FLASHINFER_MOE_FP4": "1", "VLLM_TEST_FORCE_FP8_MARLIN": "1"},
    {"VLLM_USE_FLASHINFER_MOE_FP8": "1", "VLLM_USE_DEEP_GEMM": "1"},
    {"VLLM_USE_DEEP_GEMM": "1", "VLLM_TEST_FORCE_FP8_MARLIN": "1"},
    {"VLLM_USE_DEEP_GEMM": "0", "VLLM_TEST_FORCE_FP8_MARLIN": "1"},
    {"VLLM_USE_FLASHINFER_MOE_MXFP4_BF16": "1", "VLLM_MXFP4_USE_MARLIN": "1"},
    {"VLLM_USE_FLASHINFER_MOE_MXFP4_BF16": "0", "VLLM_MXFP4_USE_MARLIN": "1"},
    {"VLLM_NVFP4_MOE_BACKEND": "MARLIN"},
    {"VLLM_NVFP4_GEMM_BACKEND": "marlin"},
    {"VLLM_NVFP4_GEMM_BACKEND": "MARLIN"},
)
"""The values of the variables that ever meant something."""
FEW = (((8, 0), (9, 0), (10, 0), (12, 0)), ("silu",))
LEADING = ("VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8", "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS")
"""The variables that lead to kernels which nothing else leads to."""
Texts = dict[str, int]
"""Text -> its number, because the same few answers come back thousands of times."""


def main() -> None:
    logging.disable(logging.CRITICAL)
    oracle = Oracle(dict.fromkeys(LIBRARIES, True))
    numbers: Texts = {}
    automatic = {scheme: grid(oracle, scheme, "auto", numbers) for scheme in SCHEMES}
    flags = sorted(get_args(__import__("vllm.config.kernel", fromlist=["MoEBackend"]).MoEBackend))
    on_request: dict[str, dict[str, Any]] = {scheme: {} for scheme in SCHEMES}
    for scheme in SCHEMES:
        for flag in flags:
            if flag != "auto":
                on_request[scheme][flag] = ask_flag(oracle, scheme, flag, automatic[scheme], numbers)
    needs = {name: find_needs(oracle, name, [flag for flag in flags if flag != "auto"]) for name in SCHEMES}
    answers = json.dumps(
        {
            "activations": oracle.list_activations(),
            "flags": flags,
            "notes": oracle.substitute.notes,
            "automatic": automatic,
            "on_request": on_request,
            "needs": needs,
            "with_variables": {
                scheme: [
                    [name, grid_with(oracle, scheme, numbers, {name: "1"})]
                    for name in (LEADING if scheme == "mxfp4" else ())
                ]
                for scheme in SCHEMES
            },
            "overridden": {
                scheme: [[each, grid_with(oracle, scheme, numbers, each, *FEW)] for each in ENVIRONMENTS]
                for scheme in SCHEMES
            },
            "texts": list(numbers),
        }
    )
    print(f"ANSWER {answers}")


def ask_flag(oracle: Oracle, scheme: str, flag: str, automatic: list[list[Any]], numbers: Texts) -> Any:
    """Return the flag's answers: at a few points where those kernels are in the automatic order too, else
    everywhere."""
    texts = list(numbers)
    known = {json.loads(texts[number])[0] for row in automatic for number in row[3]}
    few = grid(oracle, scheme, flag, numbers, CAPABILITIES[6:8], ("silu",))
    texts = list(numbers)
    heard = {json.loads(texts[number])[0] for row in few for number in row[3]}
    return few if heard <= known else grid(oracle, scheme, flag, numbers)


def grid(
    oracle: Oracle,
    scheme: str,
    moe_backend: str,
    numbers: Texts,
    capabilities: Sequence[tuple[int, int]] = CAPABILITIES,
    activations: Sequence[str] = (),
) -> list[list[Any]]:
    """[capability, parallel, activation, answers, chosen or error] for every point; texts by number."""
    rows = []
    for capability in capabilities:
        oracle.substitute.use(capability)
        for name, activation in itertools.product(PARALLEL, activations or oracle.list_activations()):
            asked = oracle.ask_again(Layer(scheme, activation, "ep" in name, "dp" in name, moe_backend))
            answers = [numbers.setdefault(json.dumps(plain(each)), len(numbers)) for each in asked.answers]
            outcome = {"chosen": asked.chosen, "error": None if asked.chosen else asked.error}
            number = numbers.setdefault(json.dumps(outcome), len(numbers))
            shown = f"{capability[0]}.{capability[1]}"
            rows.append([shown, name, activation, answers, number])
    return rows


def grid_with(
    oracle: Oracle, scheme: str, numbers: Texts, variables: dict[str, str], *where: Any
) -> list[list[Any]]:
    """Return the rows of `grid` with these variables set."""
    with patch.dict(os.environ, variables):
        return grid(oracle, scheme, "auto", numbers, *where)


def plain(answer: Answer) -> list[Any]:
    return [answer.backend, answer.kernel, answer.supported, answer.reason]


def find_needs(oracle: Oracle, scheme: str, flags: list[str]) -> dict[str, list[str]]:
    """Kernel -> the optional libraries without which it is not supported anywhere that it was."""
    layers = [
        Layer(scheme, activation, ep, dp, flag)
        for ep, dp in ((False, False), (True, True))
        for activation in ("silu", "swigluoai", "relu2_no_mul")
        for flag in ("auto", *flags)
        if activation in oracle.list_activations()
    ]

    def list_supported() -> set[tuple[Any, ...]]:
        triples = set()
        for capability in ((8, 0), (9, 0), (10, 0), (12, 0)):
            oracle.substitute.use(capability)
            for layer in layers:
                for answer in oracle.ask_again(layer).answers:
                    if answer.supported:
                        triples.add((capability, layer, answer.backend, answer.kernel))
        return triples

    everything = list_supported()
    needs: dict[str, list[str]] = {}
    for library in LIBRARIES:
        oracle.substitute.pretend({library: False})
        without = list_supported()
        oracle.substitute.pretend({library: True})
        for _, _, backend, kernel in everything - without:
            libraries = needs.setdefault(f"{backend}/{kernel}", [])
            if library not in libraries:
                libraries.append(library)
    return {name: sorted(libraries) for name, libraries in sorted(needs.items())}


if __name__ == "__main__":
    main()
