"""The tables of settings against the installed vLLM: its parser and its declared variables."""

import importlib.metadata

import pytest

from moedoctor.diagnose.settings.flags import read_flags
from moedoctor.diagnose.settings.tables import load_vllm_flags, load_vllm_variables
from tests.real_vllm import ask_child

CODE = """
import importlib, importlib.util, json
from moedoctor.upstream.selection.substitute import install
install().use((9, 0))
places = [f"vllm.entrypoints.{one}.cli_args" for one in ("openai", "launchers", "common")]
folders = [one for one in places if importlib.util.find_spec(one.rpartition(".")[0])]
arguments = importlib.import_module(next(one for one in folders if importlib.util.find_spec(one)))
empty = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
parser = arguments.make_arg_parser(empty)
flags = {}
for action in parser._actions:
    choices = list(map(str, action.choices)) if action.choices else []
    flags.update({name: choices for name in action.option_strings if name.startswith("--")})
print("ANSWER " + json.dumps([flags, list(importlib.import_module("vllm.envs").environment_variables)]))
"""


@pytest.fixture(scope="module")
def answer() -> tuple[str, dict[str, list[str]], list[str]]:
    """Return (release, flags with their choices, variables) of the installed vLLM."""
    release = importlib.metadata.version("vllm").partition("+")[0]
    if release not in load_vllm_flags().releases:
        pytest.skip(f"vllm {release} is not in the tables")
    (flags, variables), _ = ask_child(CODE)
    return release, flags, variables


@pytest.mark.upstream
def test_every_flag_of_the_real_parser_is_known(answer: tuple[str, dict[str, list[str]], list[str]]) -> None:
    release, flags, _ = answer
    known = load_vllm_flags().list_at(release)
    derived = ("--no-", "--disable-", "--enable-", "--help")  # switches come with their opposites
    assert {name for name in flags if name not in known and not name.startswith(derived)} == set()
    assert all(row.name for row in read_flags([name for name in flags if name != "--help"], release))
    assert len(flags) > 200


@pytest.mark.upstream
def test_the_choices_are_those_of_the_real_parser(answer):
    release, flags, _ = answer
    known = load_vllm_flags().list_at(release)
    for name in ("--moe-backend", "--all2all-backend", "--linear-backend"):
        if flags.get(name):
            assert set(flags[name]) <= set(known[name].choices), name
    assert set(flags["--moe-backend"]) == set(known["--moe-backend"].choices)


@pytest.mark.upstream
def test_the_variables_are_those_that_it_declares(answer):
    release, _, variables = answer
    rows = load_vllm_variables().list_at(release).items()
    assert {name for name, row in rows if row.kind != "elsewhere"} == set(variables)
