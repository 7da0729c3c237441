"""Asking a vLLM for its own selection: stubs, some in a process of their own, and the real one."""

import importlib.metadata
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_stub import FILES, write

from moedoctor.fixes.backends import select
from moedoctor.fixes.backends.release_tables import SCHEMES, load_releases
from moedoctor.upstream.selection import agreement
from moedoctor.upstream.selection.linear_kernels import CHOOSERS, Offers, explain_kernels, record_offers
from moedoctor.upstream.selection.oracle import Answer, Asked

ROOT = Path(__file__).resolve().parents[3]

# All that selection asks of torch. The real one takes seconds to import, in each child.
TORCH = """
import types

bfloat16 = "bfloat16"
ops = types.SimpleNamespace(_C=types.SimpleNamespace())
"""


@pytest.fixture
def light_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(TORCH, encoding="utf-8")


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stub of vLLM, beside the real torch unless a test takes `light_torch`."""
    monkeypatch.setenv("PYTHONPATH", f"{write(tmp_path)}:{ROOT}")
    return tmp_path


def test_one_process_answers_for_any_capability_activation_and_scheme(stub: Path) -> None:
    named = ("FLASHINFER_TRTLLM", "VLLM_CUTLASS", "MARLIN")
    expected = {"10.0": (True, True, True), "12.0": (False, True, True), "8.0": (False, False, True)}
    *answers, nothing, ungated, unquantized = agreement.ask_all(
        [
            *(select(capability, "nvfp4", release="0.21.0") for capability in (*expected, "7.5")),
            select("12.0", "nvfp4", release="0.21.0", activation="relu2_no_mul"),
            select("12.0", "bf16", release="0.19.1"),
        ]
    )
    for heard, supported in zip(answers, expected.values(), strict=True):
        assert [not why for why in map(heard.refusals.get, named)] == list(supported)
        assert list(heard.refusals) == list(named)
        assert (heard.chosen, heard.error) == (named[supported.index(True)], None)
        assert any("do not load here" in note for note in heard.notes)
    assert nothing.chosen is None
    assert nothing.error == "No NvFp4 MoE backend supports the deployment configuration."
    assert ungated.chosen == "MARLIN"
    assert (unquantized.chosen, unquantized.refusals) == ("TRITON", {}), "it selects without kernels"


@pytest.mark.usefixtures("light_torch")
def test_the_flag_is_passed_on(stub: Path) -> None:
    plain = select("12.0", "nvfp4", release="0.21.0")
    assert agreement.ask_all([plain], moe_backend="marlin")[0].chosen == "MARLIN"
    (refused,) = agreement.ask_all([plain], moe_backend="triton")
    assert refused.chosen is None
    assert "is not supported for NvFP4" in (refused.error or "")


@pytest.mark.usefixtures("light_torch")
def test_the_answer_lists_the_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = "def has_deep_gemm():\n    return True\n\ndef has_humming():\n    raise OSError('broken')\n"
    monkeypatch.setenv("PYTHONPATH", f"{write(tmp_path, import_utils=there)}:{ROOT}")
    (heard,) = agreement.ask_all([select("12.0", "nvfp4", release="0.21.0")])
    assert heard.libraries == {"flashinfer": False, "deep_gemm": True, "humming": False}


@pytest.mark.usefixtures("light_torch")
def test_a_backend_that_cannot_be_imported_is_skipped(tmp_path, monkeypatch):
    """Selection does not reach it on this GPU, so vLLM works."""
    body = "def backend_to_kernel_cls(backend):\n"
    broken = f"{body}    if backend.value == 'MARLIN':\n        import no_such_library\n"
    oracle = FILES["vllm/model_executor/layers/fused_moe/oracle/nvfp4.py"].format().replace(body, broken)
    monkeypatch.setenv("PYTHONPATH", f"{write(tmp_path, nvfp4=oracle)}:{ROOT}")
    points = [select(capability, "nvfp4", release="0.21.0") for capability in ("12.0", "8.0")]
    works, stops = agreement.ask_all(points)
    assert works.chosen == "VLLM_CUTLASS"
    assert works.refusals["MARLIN"].startswith("cannot be imported: ")
    assert (stops.chosen, stops.error) == (None, "No module named 'no_such_library'")


def test_a_backend_fits_if_any_of_its_kernels_does() -> None:
    heard = [("A", True, None), ("A", False, "no"), ("B", False, None), ("C", False, "no"), ("C", True, None)]
    kernels = tuple(Answer(name, "Kernel", fits, reason) for name, fits, reason in heard)
    oracle: Any = SimpleNamespace(ask=lambda *_: Asked(kernels, "A"), substitute=SimpleNamespace(notes=()))
    answer = agreement._answer_question(oracle, {"capability": "9.0", "layer": {"scheme": "nvfp4"}}, {})
    assert answer.refusals == {"A": "", "B": "vLLM gives no reason", "C": ""}


def test_disagreements_are_named() -> None:
    selection = select("12.0", "nvfp4", release="0.21.0")
    reasons = {each.backend: "" if each.supported else "no" for each in selection.candidates}
    agreed = agreement.Heard(selection.chosen, None, reasons)
    assert agreement.list_disagreements(selection, agreed) == ()
    other = agreement.Heard("MARLIN", None, {**agreed.refusals, "FLASHINFER_CUTLASS": "no", "NEW": ""})
    lines = agreement.list_disagreements(selection, other)
    assert lines[0] == "selected: MARLIN; the tables say FLASHINFER_CUTLASS"
    assert lines[1].startswith("FLASHINFER_CUTLASS: does not take this layer; the tables say: chosen")
    assert lines[2] == "NEW: not in the tables"
    broken = agreement.Heard(None, "broken", agreed.refusals)
    assert agreement.list_disagreements(selection, broken)[0].startswith("selected: broken")


@pytest.mark.usefixtures("light_torch")
@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"cuda": "raise RuntimeError('no driver')\n"}, "cannot be imported here: RuntimeError: no driver"),
        ({"nvfp4": "import nothing_like_it\n"}, "could not be asked: ModuleNotFoundError: No module named"),
        ({"config": "import os\nos._exit(3)\n"}, "could not be asked: exit status 3: it printed nothing"),
    ],
)
def test_a_vllm_that_cannot_answer_gives_the_reason(tmp_path, monkeypatch, replaced, message):
    monkeypatch.setenv("PYTHONPATH", f"{write(tmp_path, **replaced)}:{ROOT}")
    with pytest.raises(agreement.AgreementError, match=message):
        agreement.ask_all([select("12.0", "nvfp4", release="0.21.0")])


@pytest.mark.usefixtures("light_torch")
def test_a_platform_that_vllm_has_chosen_already_is_replaced_everywhere(stub: Path) -> None:
    """As on a machine with a GPU, and in releases that read the platform during import."""
    code = """
import json
import vllm.platforms
vllm.platforms._current_platform = vllm.platforms.Platform()
from vllm.platforms import current_platform as kept
from moedoctor.upstream.selection.substitute import install
substitute = install({"deep_gemm": True})
substitute.use((12, 1))
from vllm.utils.import_utils import has_deep_gemm
answers = [list(kept.get_device_capability()), kept.is_cuda(), kept.has_device_capability(120)]
print(json.dumps([*answers, has_deep_gemm()]))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == [[12, 1], True, True, True]


@pytest.mark.upstream
def test_the_installed_vllm_agrees_with_the_tables() -> None:
    """On every GPU family, scheme and parallel setting, with the optional libraries that it finds here.

    FlashInfer's CUTEDSL kernels want the CUTLASS DSL besides, which `make test-upstream` leaves out.
    """
    release = importlib.metadata.version("vllm").partition("+")[0]
    if release not in load_releases():
        pytest.skip(f"vllm {release} is not in the tables")
    points = [
        select(capability, scheme, release=release, ep=ep, dp=dp, activation=activation)
        for scheme in SCHEMES
        for capability in ("7.5", "8.0", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")
        for ep, dp in ((False, False), (True, False), (False, True), (True, True))
        for activation in ("silu", "relu2_no_mul", "swigluoai")
    ]
    answers = agreement.ask_all(points)
    wrong = []
    for point, heard in zip(points, answers, strict=True):
        given = {name: name in point.parallel for name in ("ep", "dp")} | {"activation": point.activation}
        given |= {"release": release, "libraries": heard.libraries}
        selection = select(point.capability, point.scheme, **given)
        wrong += [
            (point.capability, point.scheme, point.parallel, line)
            for line in agreement.list_disagreements(selection, heard)
            if "CUTEDSL" not in line or find_spec("cutlass") is not None
        ]
    assert wrong == []
    assert sum(len(line.refusals) for line in answers) > 1000


@pytest.mark.upstream
@pytest.mark.parametrize("flag", ["marlin", "cutlass"])
def test_the_installed_vllm_takes_the_flag(flag: str) -> None:
    release = importlib.metadata.version("vllm").partition("+")[0]
    selection = select("12.0", "nvfp4", release=release, moe_backend=flag)
    (heard,) = agreement.ask_all([selection], moe_backend=flag)
    assert heard.chosen == selection.chosen is not None


class Kernel:
    refuses = ""

    def __init__(self, config: str = "layer") -> None:
        self.config = config

    @classmethod
    def is_supported(cls, capability: int) -> tuple[bool, str]:
        return capability >= 90, f"needs 90, has {capability}"

    @classmethod
    def can_implement(cls, config: str) -> tuple[bool, str]:
        return not cls.refuses, f"{cls.refuses} {config}"


class Small(Kernel):
    refuses = "too small:"


class Used(Kernel):
    pass


class Later(Kernel):
    pass


class Old:
    @classmethod
    def get_min_capability(cls) -> int:
        return 100


@pytest.mark.parametrize(
    ("capability", "disabled", "expected"),
    [
        (90, "", {"Small": "too small: layer", "Later": "", "Old": "requires capability 100"}),
        (80, "Later", {"Small": "needs 90", "Later": "disabled", "Old": "requires capability 100"}),
        (100, "", {"Small": "too small: layer", "Later": "", "Old": "cannot be asked here"}),
    ],
)
def test_the_others_of_the_table_that_was_gone_through_are_asked(capability, disabled, expected, monkeypatch):
    tables = {"cuda": [Small, Used, Later, Old]}
    platform = SimpleNamespace(get_device_capability=lambda: SimpleNamespace(to_int=lambda: capability))
    choosers = SimpleNamespace(_POSSIBLE_KERNELS=tables, _POSSIBLE_OTHERS={"cuda": [Used]})
    monkeypatch.setitem(sys.modules, CHOOSERS, choosers)
    monkeypatch.setitem(sys.modules, "vllm.envs", SimpleNamespace(VLLM_DISABLED_KERNELS=[disabled]))
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    offers: Offers = {}
    with record_offers(offers):
        assert next(kernel for kernel in tables["cuda"] if kernel is Used)
    reasons = dict(explain_kernels([None, Used(), Used()], offers))
    assert reasons.keys() == expected.keys()
    assert all(reasons[name].startswith(words) for name, words in expected.items())
    assert type(tables["cuda"]) is list
