"""FlashInfer's own choice of targets: the adapter on a fake package, then the real package."""

import importlib.util
import itertools
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version
from processes_seen import run
from vllm_stub import write_files

from moedoctor.fixes.arch.flashinfer import predict_moe_targets
from moedoctor.results import UnavailableError
from moedoctor.upstream.flashinfer.context import FlashInferContext

torch = pytest.importorskip("torch")

LIST = "FLASHINFER_CUDA_ARCH_LIST"
HERE = importlib.util.find_spec("flashinfer") is not None
needs_flashinfer = pytest.mark.skipif(not HERE, reason="needs FlashInfer: pip install flashinfer-python")

CUDAS = [(12, 6), (12, 8), (12, 9), (13, 0)]
LISTS = [
    *("12.0 12.1", "8.9 9.0a 12.0f", "10.3 11.0 12.0", "12.0 ", " 12.0", "12.0  12.1", "12.0,12.1"),
    *("12.0;12.1", "12.0", "12.1", "9.0", "10.0", "12.0f", "12.0a", "7.5", "12.0+PTX", "120f", "sm_120f"),
    *("12.", "a.b", None, ""),
]
MOE_GPUS = [(10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]

STAND_IN = """
    import os
    import torch
    from flashinfer.jit import cpp_ext

    class CompilationContext:
        def __init__(self):
            text = os.environ.get("FLASHINFER_CUDA_ARCH_LIST")
            if text == "boom":
                raise ValueError("boom")
            assert torch.cuda.device_count() == 1
            self.TARGET_CUDA_ARCHS = {torch.cuda.get_device_capability(0)}
            self.text = text

        def get_nvcc_flags_list(self, supported_major_versions=None):
            cuda = str(cpp_ext.get_cuda_version()).replace(".", "")
            (major, minor), = self.TARGET_CUDA_ARCHS
            return [
                f"-gencode=arch=compute_{major}{minor}a,code=sm_{major}{minor}a",
                f"-gencode=arch=compute_{cuda},code=sm_{cuda}",
                f"-DLIST={self.text}",
                f"-DMAJORS={supported_major_versions}",
            ]
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A fake flashinfer that answers with its input."""
    where = "open(os.environ['FLASHINFER_WORKSPACE_BASE'] + '/log', 'w').close()"
    record = "SEEN = (os.environ.get('FLASHINFER_CUDA_ARCH_LIST'), os.environ['FLASHINFER_WORKSPACE_BASE'])"
    info = "Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 9.9\n"
    files = {
        "flashinfer/__init__.py": f"import os\n{where}\n{record}\n",
        "flashinfer/compilation_context.py": textwrap.dedent(STAND_IN),
        "flashinfer/jit/cpp_ext.py": "def get_cuda_version():\n    return 'none'\n",
        "flashinfer_python-9.9.dist-info/METADATA": info,
    }
    write_files(tmp_path, files)
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "flashinfer"}
    for name in modules:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "flashinfer"
    for name in [module for module in sys.modules if module.partition(".")[0] == "flashinfer"]:
        del sys.modules[name]
    sys.modules.update(modules)


def test_the_gpu_the_release_and_the_list_are_put_in_place_and_everything_is_put_back(stand_in, monkeypatch):
    monkeypatch.setenv(LIST, "7.5")
    before = (torch.cuda.device_count, torch.cuda.get_device_capability, dict(os.environ))
    context = FlashInferContext.installed()
    version = context.extensions.get_cuda_version
    assert context.release == "9.9"
    assert context.resolve((12, 1), (12, 8), "12.0").targets == ("121a", "128")
    assert context.resolve((9, 0), (13, 0), None).targets == ("90a", "130")
    reading = context.resolve((12, 0), (13, 0), "boom")
    assert (reading.targets, reading.error) == ((), "ValueError: boom"), "an error is an answer"
    after = (torch.cuda.device_count, torch.cuda.get_device_capability, dict(os.environ))
    assert after == before
    assert context.extensions.get_cuda_version is version


def test_the_import_leaves_no_trace(stand_in: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """FlashInfer fails at import for a list that it cannot read, and makes a cache folder with a log."""
    monkeypatch.setenv(LIST, "12.0,12.1")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "workspace"))
    FlashInferContext.installed()
    listed, workspace = sys.modules["flashinfer"].SEEN
    assert listed == "8.0"
    assert workspace != str(tmp_path / "workspace")
    assert not Path(workspace).exists()


def test_a_package_that_does_not_import_is_unavailable(stand_in: Path) -> None:
    (stand_in / "__init__.py").write_text("import no_such_module_here\n")
    with pytest.raises(UnavailableError, match=r"flashinfer 9\.9 does not import: ModuleNotFoundError"):
        FlashInferContext.installed()


@pytest.mark.skipif(HERE, reason="FlashInfer is installed here")
def test_an_absent_package_is_unavailable() -> None:
    with pytest.raises(UnavailableError, match="flashinfer is not installed here"):
        FlashInferContext.installed()


@pytest.mark.upstream
@needs_flashinfer
def test_the_installed_release_answers_as_restated() -> None:
    context = FlashInferContext.installed()
    for gpu, cuda, text in itertools.product(MOE_GPUS, CUDAS, LISTS):
        real = context.resolve(gpu, cuda, text)
        restated = predict_moe_targets(context.release, capability=gpu, cuda=cuda, arch_list=text)
        targets = real.targets
        if Version(context.release) < Version("0.6.6"):  # a set there, in any order
            targets = tuple(sorted(targets, key=restated.targets.index))
        assert (targets, bool(real.error)) == (restated.targets, bool(restated.error)), (gpu, cuda, text)


@pytest.mark.upstream
@needs_flashinfer
def test_the_real_import_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "from moedoctor.upstream.flashinfer.context import FlashInferContext as C; "
        "print(*C.installed().resolve((12, 0), (13, 0), '12.0f').targets)"
    )
    environ = {**os.environ, "HOME": str(tmp_path), LIST: "12.0,12.1"}
    environ.pop("FLASHINFER_WORKSPACE_BASE", None)
    done = run([sys.executable, "-c", code], env=environ, check=True)
    assert done.stdout.split() == ["120f"]
    assert not (tmp_path / ".cache" / "flashinfer").exists()
