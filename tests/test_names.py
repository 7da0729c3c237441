"""Function names are verbs and docstrings open with a verb or the thing (CONTRIBUTING, *Names*)."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "moedoctor"
VERBS = frozenset(
    """
    abandon accept acquire activate add admit adopt adjust agree align allocate allow announce answer append apply ask assemble
    assign attach audit await begin bench bind bound break bring build cache calibrate call cancel capture carry cast change
    charge check choose classify clean clear close collect combine compare compile complete compose compute conclude confirm
    connect construct contain convert copy correct count cover crash create cut decide declare decode decorate deduplicate
    deliver depend dequantize derive describe detach detect diagnose differ disagree divide download drain draw drop embed emit
    encode end ensure enter escape estimate evict exchange exclude execute exit expand explain expose express extend extract
    fail fetch fill filter finalize find finish fit flatten flush fold follow forbid forget fork format forward free freeze
    gather generate get give go group guard guess handle hang hash hide hold hook identify ignore import include index infer
    inherit inject insert inspect install interpret invert iterate join judge keep know lack last launch leave let limit link
    lint list listen load locate lock look lower make map mark mask match mean measure mend merge mirror mock move multiply
    mutate name need normalize note notice number observe occupy offload omit open order overlap override overwrite own pack
    pad parse pass patch peek perform pick pin place plan poison predict prefetch prepare pretend prevent print probe produce
    profile protect prove provide provoke publish put quantize query quote raise rank reach read reap rebuild receive recognize
    record reduce refer refuse register reject relate release reload remember remove rename render repack repair repeat
    replace replay report request require rescale reserve reset resize resolve respond restate restore resume retry return
    reuse rewrite roll round route run sample save say scale scan search seed select send separate serve set settle shape
    share shift ship shorten show shrink simulate skip sleep slice snapshot solve sort spell spend split spread stack stand
    start state stay step stop store stream strip submit subtract suggest suit sum summarize supply support swap switch
    synchronize take tell test throw tick tile time trace track transfer transform translate transpose triage trim truncate
    try turn undo unify unlock unpack unwrap update upload use validate verify view visit wait walk warn watch weigh wind
    work wrap write yield
    """.split()
)
PREDICATES = frozenset({"is", "are", "has", "can", "may", "does", "did", "was", "must"})
# Names that others give: Python's protocols, pytest's and vLLM's hooks, commands, and public functions in the field's terms.
GIVEN = frozenset({"main", "faulty", "fixed", "installed"})
OPENINGS = frozenset({"What", "Whether", "Who", "How", "Where", "Why", "Which", "When"})


def list_definitions() -> Iterator[tuple[Path, ast.FunctionDef | ast.ClassDef]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield path, node


def is_named_by_others(function: ast.FunctionDef) -> bool:
    decorators = " ".join(ast.unparse(each) for each in function.decorator_list)
    others = ("property", "setter", "jit", "validator", "fixture")
    return any(word in decorators for word in others) or function.name.startswith(("__", "pytest_", "visit_", "to_", "from_")) or function.name in GIVEN


def begins_with_verb(function: ast.FunctionDef) -> bool:
    word = function.name.strip("_").split("_")[0]
    if function.returns is not None and ast.unparse(function.returns).startswith(("bool", "TypeGuard", "TypeIs")):
        third_person = {word.removesuffix("s"), word.removesuffix("es"), word.removesuffix("ies") + "y"}
        if word in PREDICATES or third_person & VERBS:
            return True
    return word in VERBS


def test_functions_are_named_by_verbs() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE.parent)}:{node.lineno} {node.name}"
        for path, node in list_definitions()
        if isinstance(node, ast.FunctionDef) and not is_named_by_others(node) and not begins_with_verb(node)
    ]
    assert not wrong, "not an imperative verb (a predicate that returns bool may be in the third person):\n" + "\n".join(wrong)


def test_docstrings_open_with_a_verb_or_the_thing() -> None:
    wrong = [
        f"{path.relative_to(PACKAGE.parent)}:{node.lineno} {node.name}: {text.splitlines()[0]}"
        for path, node in list_definitions()
        if (text := ast.get_docstring(node)) and text.split()[0] in OPENINGS
    ]
    assert not wrong, "\n".join(wrong)
