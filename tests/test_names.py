"""Names say what a thing is, functions are named by verbs, and docstrings open with a verb or the thing."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
EMPTY = {"one", "said", "seen", "both", "told"}


def find_empty_names(text: str) -> set[str]:
    """Return the empty names that the code gives to variables, parameters, functions and classes."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.arg)):
            found.add(node.arg if isinstance(node, ast.arg) else node.name.strip("_"))
    return found & EMPTY


def test_no_name_is_empty() -> None:
    words = re.compile(rf"\b_*(?:{'|'.join(EMPTY)})_*\b\s*(?:[-+*/@%&|^<>]*=|[]:,)(]|in\b)")
    files = [file for folder in ("moedoctor", "scripts", "tests") for file in (ROOT / folder).rglob("*.py")]
    texts = {file: text for file in files if words.search(text := file.read_text(encoding="utf-8"))}
    assert not {file: names for file, text in texts.items() if (names := find_empty_names(text))}
    assert find_empty_names("def _said(told):\n    for one in told:\n        seen = both = one\n") == EMPTY


VERBS = frozenset((Path(__file__).parent / "verbs.txt").read_text(encoding="utf-8").split())
PREDICATES = frozenset({"is", "are", "has", "can", "may", "does", "did", "was", "must"})
GIVEN = frozenset((Path(__file__).parent / "given_names.txt").read_text(encoding="utf-8").split())
"""Names of others (Python, pytest, pydantic, vLLM, Typer), of what packages implement for a failure (a lab
has a method for each tier), of failure_cases.yaml, and of public functions in the field's terms."""
CHECKED = re.compile(r"moedoctor/|.* _*(?:[a-z]+ed|made|(?:dr|gr|kn|sh)[ao]wn)(?:_|$)")
"""Places of functions that need a verb: all in the package, and participles in scripts and evidence."""
OPENINGS = re.compile(r"\s*(?:What|Whether|Who|Whose|How|Where|Why|Which|When)\b")


def walk_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is below a statement; expressions, which are most of a tree, hold no definitions."""
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(node, block, ()):
            yield child
            yield from walk_statements(child)


@functools.cache
def read_package() -> tuple[dict[str, ast.FunctionDef], dict[str, str]]:
    """Return the heads of functions, and the docstrings of all that can have one, each by its place."""
    functions, docstrings, folders = {}, {}, ("moedoctor", "scripts", "evidence")
    for path in [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]:
        for node in list(walk_statements(ast.parse(path.read_text(encoding="utf-8")))):
            if isinstance(node, ast.FunctionDef):
                del node.body[:]  # a million objects, which each garbage collection would visit
                functions[f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"] = node
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                docstrings[f"{path.relative_to(ROOT)}:{node.lineno}"] = str(node.value.value)
    return functions, docstrings


def is_verb(function: ast.FunctionDef) -> bool:
    """Return True for an imperative, and for the third person of a function that returns bool."""
    word = function.name.strip("_").split("_")[0]
    if word in VERBS:
        return True
    if function.returns is not None and ast.unparse(function.returns).startswith(
        ("bool", "TypeGuard", "TypeIs")
    ):
        third_person = {word.removesuffix("s"), word.removesuffix("es"), word.removesuffix("ies") + "y"}
        return word in PREDICATES or bool(third_person & VERBS)
    return False


def is_given(function: ast.FunctionDef) -> bool:
    """Return True for a property, a kernel, a hook, a conversion, and a name that others give."""
    decorators = " ".join(map(ast.unparse, function.decorator_list))
    if any(word in decorators for word in ("property", "setter", "jit", "validator")):
        return True
    return function.name in GIVEN or function.name.startswith(("__", "pytest_", "visit_", "to_", "from_"))


def test_functions_are_named_by_verbs() -> None:
    checked = {place: node for place, node in read_package()[0].items() if CHECKED.match(place)}
    assert not [place for place, node in checked.items() if not (is_verb(node) or is_given(node))]


def test_docstrings_open_with_a_verb_or_the_thing() -> None:
    assert not [place for place, text in read_package()[1].items() if OPENINGS.match(text)]


def test_a_participle_is_noticed() -> None:
    tree = ast.parse("def judged() -> str: ...\ndef fits() -> bool: ...\ndef fit() -> None: ...")
    assert [is_verb(node) for node in tree.body if isinstance(node, ast.FunctionDef)] == [False, True, True]
    assert [bool(CHECKED.match(f"a.py:1 {name}")) for name in ("_made", "tiles")] == [True, False]
