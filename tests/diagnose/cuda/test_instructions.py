"""The table of instructions agrees with this machine's compilers; faulty compilers are handled."""

from pathlib import Path

import pytest
from cuda_fakes import fake_tool

from moedoctor.diagnose.cuda import instructions as toolchain
from moedoctor.fixes.arch.targets import Target, is_known_target, list_targets, loads_sass
from moedoctor.processes import cuda_tools
from moedoctor.processes.cuda_tools import Tool, find_tools, run_tool

COMPILERS = toolchain.find_compilers()
needs_compiler = pytest.mark.skipif(not COMPILERS, reason="needs ptxas: pip install triton, or CUDA on PATH")
EVERY_TARGET = sorted(
    {target for cuda in ((12, 8), (12, 9), (13, 4)) for target in list_targets(cuda) if target.major > 6}
)
NOWHERE = {"PATH": "/nonexistent"}


@pytest.fixture
def only_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder that is searched for tools."""
    monkeypatch.setattr(cuda_tools, "_list_candidates", lambda names, _: [tmp_path / name for name in names])
    return tmp_path


@needs_compiler
@pytest.mark.parametrize("compiler", COMPILERS, ids=str)
def test_every_compiler_accepts_what_the_table_says(compiler: Tool) -> None:
    known = [str(each) for each in EVERY_TARGET if toolchain.try_instruction(compiler, each, None).accepted]
    assert known == [str(target) for target in EVERY_TARGET if is_known_target(target, compiler.cuda)]
    for target in ("89", "90", "90a", "100a", "100f", "110a", "120", "120a", "120f", "121a"):
        parsed = Target.parse(target)
        results = toolchain.try_instructions(compiler, parsed, toolchain.INSTRUCTIONS)
        taken = [name for name, result in results.items() if result.accepted]
        known = [each for each in toolchain.INSTRUCTIONS if toolchain.takes(parsed, each, compiler.cuda)]
        assert taken == [each.name for each in known], target


@needs_compiler
def test_families_are_those_of_the_compiler(tmp_path: Path) -> None:
    """PTX of a family target compiles for exactly those GPUs that `loads_sass` names."""
    newest = COMPILERS[-1]
    if newest.cuda < (12, 9):
        pytest.skip(f"{newest} knows no family targets")
    plain = [target for target in list_targets(newest.cuda) if not target.suffix and target.major >= 10]
    for source in (target for target in list_targets(newest.cuda) if target.suffix):
        reached = [gpu.capability for gpu in plain if _goes_to(newest, source, gpu, tmp_path)]
        # ptxas refuses ``a`` PTX for the plain target of the same GPU, but the driver accepts it.
        mine = source.capability if source.suffix == "a" else None
        loads = [gpu.capability for gpu in plain if loads_sass(source, gpu.capability)]
        assert reached == [gpu for gpu in loads if gpu != mine], str(source)


def _goes_to(compiler: Tool, source: Target, gpu: Target, folder: Path) -> bool:
    """Return whether PTX for `source` compiles for `gpu`."""
    version = toolchain.find_ptx_version(compiler.cuda)
    text = toolchain._SOURCE.format(version=version, target=source, statements="")
    (folder / "probe.ptx").write_text(text)
    options = [f"-arch=sm_{gpu}", "probe.ptx", "-o", "probe.cubin"]
    return run_tool(compiler.path, options, folder=str(folder)).code == 0


def test_files_that_are_not_tools_are_skipped(only_here: Path) -> None:
    (only_here / "a_folder").mkdir()
    (only_here / "not_executable").write_text("#!/bin/sh\necho 'release 13.0, V13.0.88'\n")
    for name, text in (("no_release", "#!/bin/sh\necho hello\n"), ("no_program", "no script, no ELF")):
        (only_here / name).write_text(text)
        (only_here / name).chmod(0o755)
    assert find_tools(["absent", *(file.name for file in only_here.iterdir())]) == ()


def test_tools_come_from_cuda_home_and_path(tmp_path: Path) -> None:
    fake_tool(tmp_path / "home" / "bin", "nvcc", "12.4")
    fake_tool(tmp_path / "path", "nvcc", "12.5")
    environ = {"CUDA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path")}
    found = {tool.cuda: tool.path for tool in find_tools(["nvcc"], environ)}
    assert found[12, 4] == str(tmp_path / "home" / "bin" / "nvcc")
    assert found[12, 5] == str(tmp_path / "path" / "nvcc")


def test_tritons_tools_are_found_without_cuda() -> None:
    triton = pytest.importorskip("triton")
    root = str(Path(triton.__file__).parent)
    assert any(tool.path.startswith(root) for tool in find_tools(["ptxas"], NOWHERE))


def test_a_compiler_that_hangs_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fake_tool(tmp_path, "ptxas", "13.0", "sleep 30")
    monkeypatch.setattr(toolchain, "_SECONDS", 0.2)
    hanging = Tool("ptxas", str(path), (13, 0), "hangs")
    assert toolchain.try_instruction(hanging, Target(12, 0), None).line == "ptxas: no answer within 0.2 s"


def test_a_missing_compiler_accepts_nothing(tmp_path: Path) -> None:
    gone = Tool("ptxas", str(tmp_path / "ptxas"), (13, 0), "gone")
    results = toolchain.try_instructions(gone, Target(12, 0), toolchain.INSTRUCTIONS)
    assert {value.accepted for value in results.values()} == {False}
    assert "ptxas does not start: No such file or directory" in results["wgmma"].line


SYNTAX_ERROR = r"""
grep -q tensormap probe.ptx && grep -q setmaxnreg probe.ptx && {
  echo "ptxas probe.ptx, line 9; error   : Unknown modifier" >&2
  echo "ptxas probe.ptx, line 10; fatal   : Parsing error near ':': syntax error" >&2
  echo "ptxas fatal   : Ptx assembly aborted due to errors" >&2; exit 255; }
grep -q cvt probe.ptx && { echo "ptxas probe.ptx, line 7; error   : no cvt" >&2; exit 255; }
exit 0
"""


def test_a_syntax_error_does_not_hide_other_errors(tmp_path: Path) -> None:
    path = fake_tool(tmp_path, "ptxas", "12.0", SYNTAX_ERROR)
    tool = Tool("ptxas", str(path), (12, 0), "syntax")
    results = toolchain.try_instructions(tool, Target(9, 0, "a"), toolchain.INSTRUCTIONS)
    assert [name for name, result in results.items() if not result.accepted] == ["cvt_e2m1x2"]


def test_a_tool_gets_no_shell_and_no_input(tmp_path: Path) -> None:
    path = fake_tool(tmp_path, "echo", "13.0", 'printf "%s\\n" "$@"; cat')
    ended = run_tool(str(path), ["$(touch hacked)", "a b"], folder=str(tmp_path))
    assert ended.stdout.splitlines() == ["$(touch hacked)", "a b"]
    assert not (tmp_path / "hacked").exists()
