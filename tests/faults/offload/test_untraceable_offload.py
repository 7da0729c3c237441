"""MD005 on a release's own code: what is cut out of its file runs, is compiled and judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moedoctor.faults.offload.untraceable_offload import UntraceableOffload
from moedoctor.faults.offload.untraceable_offload_lab import FILE
from moedoctor.results import Case, CaseVerdict, Tier, UnavailableError
from moedoctor.upstream.releases.release_source import ReleaseSource, SourceError

RELEASE = """
class UVAOffloader(BaseOffloader):
    def _maybe_offload_to_cpu(self, module: nn.Module, prefix: str = "") -> nn.Module:
        device = next(module.parameters()).device
        if device == torch.device("cpu"):
            return module
        for name, p in module.named_parameters():
            if {skip} or not any(f".{{one}}." in f".{{name}}." for one in self.cpu_offload_params):
                continue
            self.cpu_offload_bytes += p.nbytes
        original = module.forward

        def forward(*args, **kwargs):
            module.forward = original
            state = {{key: {value} for key, value in {state}}}
            output = functional_call(module, state, args=args, kwargs=kwargs, tie_weights=False)
            module.forward = forward
            return output

        module.forward = forward
        return module
"""


def judged(tmp_path: Path, **changed: str) -> Any:
    given = {"skip": "False", "value": "value", "state": "module.named_parameters()", **changed}
    file = tmp_path / FILE
    file.parent.mkdir(parents=True)
    file.write_text(RELEASE.format(**given), encoding="utf-8")
    fault = UntraceableOffload()
    values = {"layers": 3, "experts": 2, "hidden": 16, "intermediate": 16}
    parameters = fault.parameters(**values).model_dump()
    case = Case("MD005", "vllm@0.21.0", Tier.LIBRARY, parameters)
    return fault.judge(case, fault.observe(case, ReleaseSource(tmp_path)))


def test_a_release_that_can_be_traced_is_clean(tmp_path: Path) -> None:
    assert judged(tmp_path).verdict is CaseVerdict.CLEAN


def test_a_release_that_breaks_the_graph_is_not(tmp_path: Path) -> None:
    found = judged(tmp_path, state="(list(module.named_parameters()), breakpoint())[0]")
    assert found.verdict is CaseVerdict.REPRODUCED
    assert found.figure.startswith("torch ")


def test_nor_is_one_that_gives_other_numbers(tmp_path: Path) -> None:
    found = judged(tmp_path, value="value * 2")
    assert (found.verdict, "other numbers" in found.figure) == (CaseVerdict.REPRODUCED, True)


def test_a_release_that_offloads_nothing_here_is_not_judged(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="from a GPU alone"):
        judged(tmp_path, skip='p.device.type == "cpu"')


def test_a_release_without_the_method(tmp_path: Path) -> None:
    (tmp_path / FILE).parent.mkdir(parents=True)
    (tmp_path / FILE).write_text("class UVAOffloader: ...\n", encoding="utf-8")
    case = Case("MD005", "vllm@0.21.0", Tier.LIBRARY, UntraceableOffload().parameters().model_dump())
    with pytest.raises(SourceError, match="no function UVAOffloader"):
        UntraceableOffload().observe(case, ReleaseSource(tmp_path))
