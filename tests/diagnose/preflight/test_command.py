"""Starts are read from words, compose files and scripts."""

from pathlib import Path

import pytest

from moedoctor.diagnose.preflight import command as lines


@pytest.mark.parametrize(
    ("line", "words", "variables"),
    [
        ("vllm serve M --x 1", ("M", "--x", "1"), {}),
        ("VLLM_A=1 FOO=2 vllm serve M", ("M",), {"VLLM_A": "1"}),
        ("python -m vllm.entrypoints.openai.api_server --x 1 --model M", ("M", "--x", "1"), {}),
        (
            "docker run -e VLLM_A=1 vllm/vllm-openai:v0.33.0 --model=M -tp 2",
            ("M", "-tp", "2"),
            {"VLLM_A": "1"},
        ),
        ("vllm serve --model M", ("M",), {}),
    ],
)
def test_words(line: str, words: tuple[str, ...], variables: dict[str, str]) -> None:
    command = lines.read_words(line.split())
    assert (command.words, dict(command.variables)) == (words, variables)


@pytest.mark.parametrize("line", ["vllm serve", "vllm serve --tensor-parallel-size 2", "vllm"])
def test_a_line_without_a_model(line: str) -> None:
    with pytest.raises(lines.CommandError, match="names no model"):
        lines.read_words(line.split())


def test_sizes_replace_those_of_the_line() -> None:
    given = ("M", "-tp", "4", "--enable_expert_parallel", "--tensor-parallel-size=8", "-x")
    command = lines.ServeCommand(given, {})
    assert command.use_sizes(2, False).words == ("M", "-x", "--tensor-parallel-size", "2")
    assert command.source == ("M", "main")
    assert lines.ServeCommand(("M", "-x", "--revision=abc"), {}).source == ("M", "abc")
    assert command.use_sizes(1, True).words[-1] == "--enable-expert-parallel"
    assert lines.ServeCommand(("M", "--trust_remote_code", "-x"), {}).drop_trust().words == ("M", "-x")


def test_compose(tmp_path: Path) -> None:
    path = tmp_path / "compose.yaml"
    path.write_text(
        "services:\n  web: {image: nginx}\n  llm:\n    image: vllm/vllm-openai:v0.33.0\n"
        "    command: --model M --max-model-len 100\n    environment: [VLLM_A=1, OTHER=2]\n"
    )
    command = lines.read_compose(path)
    assert command.words == ("M", "--max-model-len", "100")
    assert command.variables == {"VLLM_A": "1"}


def test_a_script_is_read_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "serve.py"
    path.write_text(
        "import vllm\nraise SystemExit\nllm = vllm.LLM('M', tensor_parallel_size=2, enforce_eager=True,\n"
        "    enable_prefix_caching=False, seed=None, compilation_config={'mode': 0}, max_model_len=LENGTH)\n"
    )
    command = lines.read_script(path)
    flags = "--tensor-parallel-size 2 --enforce-eager --no-enable-prefix-caching --compilation-config"
    assert command.words == ("M", *flags.split(), '{"mode": 0}')
    assert "max_model_len is not a literal" in command.notes[-1]


@pytest.mark.parametrize(
    ("read", "name", "text", "message"),
    [
        (lines.read_compose, "compose.yaml", "services: {web: {image: nginx}}", "no service runs vLLM"),
        (
            lines.read_compose,
            "compose.yaml",
            "services: {a: {image: vllm}, b: {image: vllm}}",
            "2 services run vLLM",
        ),
        (lines.read_compose, "compose.yaml", "[1", r"compose\.yaml:1: not valid YAML"),
        (lines.read_compose, "compose.yaml", "3", "no service runs vLLM"),
        (lines.read_script, "serve.py", "print(1)", "expected such a call"),
        (lines.read_script, "serve.py", "LLM(model=name)", "the model is not a text"),
        (lines.read_script, "serve.py", "LLM(", "as Python"),
    ],
)
def test_a_file_without_one_server_or_its_model_is_refused(tmp_path, read, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(lines.CommandError, match=message):
        read(tmp_path / name)
