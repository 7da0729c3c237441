"""Libraries that a GPU never uses: not needed there, and everything else still missing."""

import json
import zipfile
from pathlib import Path

import pytest
from cuda_fakes import fake_cubin, fake_tool
from real_vllm import ask_child

from moedoctor.commands.audit import audit as audit_command
from moedoctor.diagnose.cuda.audit import audit
from moedoctor.diagnose.cuda.library_use import VLLM, find_library_use
from moedoctor.fixes.arch.targets import parse_capability
from moedoctor.fixes.backends import CAPABILITIES
from moedoctor.processes.cuda_tools import Tool

LIBRARIES = {
    "vllm/_C.abi3.so": "120",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": "90a",
    "vllm/_flashmla_C.abi3.so": "90a",
    "vllm/_qutlass_C.abi3.so": "100a",
}


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """A cuobjdump that finds one piece of the target that is the file's own text behind its magic."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "piece").write_bytes(fake_cubin(100, command_line="-arch sm_100a -m 64"))
    listing = "Fatbin elf code:\\n================\\narch = sm_"
    search = 'grep -q "@{0}@" "$last" && printf "{1}{0}\\n"'
    lines = [search.format(target, listing) for target in ("75", "90a", "100a", "120")]
    body = "for last; do :; done\n" + "\n".join(lines) + "\nexit 0"
    path = fake_tool(tmp_path / "tools", "cuobjdump", "13.1", body)
    return Tool("cuobjdump", str(path), (13, 1), "13.1.80")


def binary(target: str) -> bytes:
    return b"\x7fELF" + bytes(60) + f"@{target}@".encode()


def wheel(folder: Path, **more: str) -> Path:
    path = folder / "vllm-0.33.0-cp38-abi3-linux.whl"
    with zipfile.ZipFile(path, "w") as file:
        for name, target in {**LIBRARIES, **more}.items():
            file.writestr(name, binary(target))
    return path


def fates(path: Path, gpu: tuple[int, int], tool: Tool) -> dict[str, str | None]:
    return {Path(item.path.partition("!")[2]).name: item.verdict for item in audit([path], gpu, tool)}


def test_a_stock_wheel_has_what_its_gpu_uses(tmp_path: Path, tool: Tool) -> None:
    assert fates(wheel(tmp_path), (12, 0), tool) == {
        "_C.abi3.so": "loads",
        "_vllm_fa3_C.abi3.so": "not_needed",
        "_flashmla_C.abi3.so": "not_needed",
        "_qutlass_C.abi3.so": "for_some",
    }
    assert fates(wheel(tmp_path), (9, 0), tool) == {
        "_C.abi3.so": "missing",
        "_vllm_fa3_C.abi3.so": "loads",
        "_flashmla_C.abi3.so": "loads",
        "_qutlass_C.abi3.so": "not_needed",
    }


def test_the_advice_fits_what_was_audited(tmp_path, tool, monkeypatch, capsys):
    monkeypatch.setattr("moedoctor.processes.cuda_tools.find_tools", lambda names: [tool])
    (tmp_path / "mine.so").write_bytes(binary("75"))
    module = tmp_path / ".cache/flashinfer/0.6.6/90a/cached_ops/sampling/sampling.so"
    module.parent.mkdir(parents=True)
    module.write_bytes(binary("90a"))
    advice = {
        wheel(tmp_path): "install a vLLM wheel",
        tmp_path / "mine.so": "compute_80,code=sm_80",
        module: "remove the module's folder",
    }
    for path, words in advice.items():
        assert audit_command([path], "8.0", "json") == 1
        out, err = capsys.readouterr()
        document = json.loads(out)
        assert all(words in finding["next_step"] for finding in document["findings"])
        assert document["findings"]
        assert document["summary"]["reasons"]
        assert all(f"exit code 1: {reason}" in err for reason in document["summary"]["reasons"])
        assert not any(other in out for other in advice.values() if other != words)
    assert audit_command([tmp_path / "mine.so"], "7.5", "json") == 0
    assert capsys.readouterr().err == ""


def test_modules_of_flashinfer_for_other_gpus() -> None:
    for gpu, module in (("12.1", "120"), ("11.0", "100"), ("10.3", "103"), ("9.0", "90"), ("8.9", "89")):
        names = [f"fused_moe_{number}" for number in ("120", "103", "100", "90", "89")]
        capability = parse_capability(gpu)
        used = [name for name in names if (use := find_library_use("x.so", name)) and use.uses(capability)]
        assert used == [f"fused_moe_{module}"]
    assert find_library_use("x.so", "fused_moe_90_h20_prebuilt_d") is find_library_use("fused_moe_90.so")
    assert find_library_use("sampling.so", "sampling") is None


_ASK = """
import inspect, json, os, sys, torch, types, vllm
package = types.ModuleType("vllm.vllm_flash_attn")  # its own __init__ needs a GPU
package.__path__ = [os.path.join(vllm.__path__[0], "vllm_flash_attn")]
sys.modules[package.__name__] = package
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.ops import flashmla
from vllm.vllm_flash_attn import flash_attn_interface as attention
attention.FA2_AVAILABLE = attention.FA3_AVAILABLE = True
flashmla._is_flashmla_available = lambda: (True, None)
kind = type(current_platform)
answers = {}
more = {}  # what the release has of these
try:
    from vllm.model_executor.layers.quantization.fp_quant import FPQuantConfig
    more["_qutlass_C"] = lambda gpu: gpu >= FPQuantConfig.get_min_capability()
except ImportError:
    pass
try:
    from vllm.models.kimi_k3.nvidia.kda import is_flashkda_supported
    asked = inspect.signature(is_flashkda_supported).parameters  # one type up to 0.27, then two
    kinds = [torch.bfloat16] * (len(asked) - 2)
    more["_flashkda_C"] = lambda gpu: is_flashkda_supported(128, *kinds, -5.0)
except ImportError:
    pass
try:
    from vllm.model_executor.layers import indexer_topk
    more["_deepselect_C"] = lambda gpu: indexer_topk.SparseIndexerTopk("auto")._has_deep_select
except ImportError:
    pass
kind.is_cuda = lambda self: True  # after the imports, which would ask the compiled kernels
for text in sys.argv[1:]:
    major, minor = map(int, text.split("."))
    kind.get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(major, minor))
    answers[text] = {
        "_vllm_fa2_C": attention.is_fa_version_supported(2),
        "_vllm_fa3_C": attention.is_fa_version_supported(3),
        "_flashmla_C": flashmla.is_flashmla_sparse_supported()[0],
        **{name: ask(10 * major + minor) for name, ask in more.items()},
    }
print("ANSWER", json.dumps(answers))
"""


@pytest.mark.upstream
def test_the_tables_are_what_vllm_answers() -> None:
    answers, _ = ask_child(_ASK, *CAPABILITIES)
    assert set(answers) == set(CAPABILITIES)
    for gpu, uses in answers.items():
        mine = {name: VLLM[name].uses(parse_capability(gpu)) for name in uses}
        assert mine == uses, gpu
