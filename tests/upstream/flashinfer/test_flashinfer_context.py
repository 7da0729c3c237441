"""FlashInfer's own choice of targets: the adapter on a fake package, then the real package and real wheels.

The wheels of several releases are read where MOEDOCTOR_FLASHINFER_WHEELS names their folder.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
import textwrap
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from moedoctor.fixes.arch.flashinfer import list_moe_majors, predict_moe_targets, predict_targets
from moedoctor.results import UnavailableError
from moedoctor.upstream.flashinfer.context import FlashInferContext

torch = pytest.importorskip("torch")

LIST = "FLASHINFER_CUDA_ARCH_LIST"
HERE = importlib.util.find_spec("flashinfer") is not None
needs_flashinfer = pytest.mark.skipif(not HERE, reason="needs FlashInfer: pip install flashinfer-python")
WHEELS = sorted(
    Path(os.environ.get("MOEDOCTOR_FLASHINFER_WHEELS") or "/nonexistent").glob("flashinfer_python-*.whl")
)

CUDAS = [(12, 6), (12, 8), (12, 9), (13, 0)]
LISTS = [
    *(
        "12.0 12.1",
        "8.9 9.0a 12.0f",
        "10.3 11.0 12.0",
        "12.0 ",
        " 12.0",
        "12.0  12.1",
        "12.0,12.1",
        "12.0;12.1",
    ),
    *("12.0", "12.1", "9.0", "10.0", "12.0f", "12.0a", "7.5", "12.0+PTX", "120f", "sm_120f", "12.", "a.b"),
    *(None, ""),
]
MOE_GPUS = [(10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]
ALL_GPUS = [(7, 5), (8, 0), (8, 9), (9, 0), *MOE_GPUS]

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
    package = tmp_path / "flashinfer"
    (package / "jit").mkdir(parents=True)
    where = "open(os.environ['FLASHINFER_WORKSPACE_BASE'] + '/log', 'w').close()"
    record = "SEEN = (os.environ.get('FLASHINFER_CUDA_ARCH_LIST'), os.environ['FLASHINFER_WORKSPACE_BASE'])"
    (package / "__init__.py").write_text(f"import os\n{where}\n{record}\n")
    (package / "compilation_context.py").write_text(textwrap.dedent(STAND_IN))
    (package / "jit" / "__init__.py").write_text("")
    (package / "jit" / "cpp_ext.py").write_text("def get_cuda_version():\n    return 'none'\n")
    info = tmp_path / "flashinfer_python-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 9.9\n")
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "flashinfer"}
    for name in modules:
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(tmp_path))
    yield package
    for name in [module for module in sys.modules if module.partition(".")[0] == "flashinfer"]:
        del sys.modules[name]
    sys.modules.update(modules)


def test_the_gpu_the_release_and_the_list_are_put_in_place(stand_in: Path) -> None:
    context = FlashInferContext.installed()
    assert context.release == "9.9"
    reading = context.resolve((12, 1), (12, 8), "12.0")
    assert reading.targets == ("121a", "128")
    assert context.resolve((9, 0), (13, 0), None).targets == ("90a", "130")


def test_everything_is_put_back(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIST, "7.5")
    before = (torch.cuda.device_count, torch.cuda.get_device_capability, dict(os.environ))
    context = FlashInferContext.installed()
    version = context.extensions.get_cuda_version
    for text in ("12.0", None, "boom"):
        context.resolve((12, 0), (13, 0), text)
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


def test_an_error_is_an_answer(stand_in: Path) -> None:
    reading = FlashInferContext.installed().resolve((12, 0), (13, 0), "boom")
    assert (reading.targets, reading.error) == ((), "ValueError: boom")


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
    import subprocess

    code = (
        "from moedoctor.upstream.flashinfer.context import FlashInferContext as C; "
        "print(*C.installed().resolve((12, 0), (13, 0), '12.0f').targets)"
    )
    environ = {**os.environ, "HOME": str(tmp_path), LIST: "12.0,12.1"}
    environ.pop("FLASHINFER_WORKSPACE_BASE", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["120f"]
    assert not (tmp_path / ".cache" / "flashinfer").exists()


def _context_of(wheel: Path, cuda: dict[str, tuple[int, int]]) -> Any:
    """The CompilationContext of a wheel that is not installed; `cuda` holds its CUDA release."""
    names = ("flashinfer", "flashinfer.jit", "flashinfer.jit.cpp_ext", "flashinfer.jit.env")
    stubs: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    extensions = stubs["flashinfer.jit.cpp_ext"]
    extensions.is_cuda_version_at_least = lambda text: cuda["is"] >= Version(text).release[:2]
    extensions.get_cuda_path = lambda: "/nonexistent"
    with zipfile.ZipFile(wheel) as packed:
        source = packed.read("flashinfer/compilation_context.py")
    module = types.ModuleType("wheel_context")
    exec(compile(source, str(wheel), "exec"), module.__dict__)
    return module.CompilationContext, stubs


@pytest.mark.parametrize("wheel", WHEELS, ids=lambda path: path.name.split("-")[1])
def test_every_wheel_answers_as_restated(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, cuda = wheel.name.split("-")[1], {"is": (13, 0)}
    context, stubs = _context_of(wheel, cuda)
    for name, module in stubs.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def real(
        gpu: tuple[int, int], text: str | None, majors: tuple[int, ...] | None
    ) -> tuple[str, ...] | None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: gpu)
        monkeypatch.delenv(LIST, raising=False) if text is None else monkeypatch.setenv(LIST, text)
        try:
            archs = sorted(context().TARGET_CUDA_ARCHS)
        except (ValueError, RuntimeError, IndexError):
            return None
        taken = [f"{major}{minor}" for major, minor in archs if majors is None or major in majors]
        return tuple(taken) or None  # an empty set ends the build with an error

    for gpu, cuda["is"], text in itertools.product(ALL_GPUS, CUDAS, LISTS):
        restated = predict_targets(release, capability=gpu, cuda=cuda["is"], arch_list=text)
        assert real(gpu, text, None) == (restated.targets or None), (gpu, cuda, text)
        if gpu in MOE_GPUS:
            restated = predict_moe_targets(release, capability=gpu, cuda=cuda["is"], arch_list=text)
            assert real(gpu, text, list_moe_majors(gpu)) == (restated.targets or None), (gpu, cuda, text)
