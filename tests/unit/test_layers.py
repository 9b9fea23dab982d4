"""Which folder may import which, checked in the source: six layers, imports only downward, and no import cycle between files.

An import inside a function and one for type checkers count like any other, because readers follow them too. The core imports
no integration. Only `cli/` loads the integration that a command or an option names, inside of a function.
"""

import ast
from collections.abc import Callable, Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import plait

SOURCE = Path(__file__).parents[2] / "src" / "plait"
FLOORS = (
    ("config", "tensors", "launch", "randomness", "data"),  # base: messages, and functions that torch lacks
    ("model", "losses"),  # models
    ("parallel",),  # splitting
    ("checkpoint", "engine"),  # running
    ("planner", "report", "proof", "chaos", "scripts", "cli", "api"),  # users of a run
    ("integrations", "ray"),  # connections to other software: `ray` is the public name of a file of integrations
)
"""From the bottom up. In a layer a folder may import those before it."""
ORDER = [folder for floor in FLOORS for folder in floor]
TECHNIQUES = ("data", "fsdp", "expert", "tensor", "context", "pipeline", "server")
"""Folders of `parallel`, in the order in which one may import the ones before it."""
WITHOUT_TORCH = (
    "config/", "report/", "integrations/submit/", "cli/main", "cli/plan_options", "parallel/pipeline/schedules",
    "parallel/pipeline/simulate",
)  # fmt: skip
"""Files loaded by `plait --help`, `plait report` and the plan parser: they must not import torch at the top."""
LOADED_LATER = {"config/phase_optimizers.py"}
"""Of these, files that are imported only when an optimizer is made."""


def modules() -> dict[str, Path]:
    """Every file by its import name."""
    paths = sorted(SOURCE.rglob("*.py"))
    names = (".".join(("plait", *p.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__") for p in paths)
    return dict(zip(names, paths))


def imports(path: Path, known: dict[str, Path], nodes: Callable[[ast.Module], Iterable[ast.AST]] = ast.walk) -> set[str]:
    """The files that one file imports, anywhere in it or in these nodes of its syntax tree."""
    found = set()
    for node in nodes(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "plait":
            full = {f"{node.module}.{a.name}" for a in node.names}
            found |= {name if name in known else str(node.module) for name in full}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.split(".")[0] == "plait"}
    return found


ARROWS = {
    name: imports(path, modules()) - {name}
    for name, path in modules().items()
    if name not in ("plait", "plait.__main__")
}


def folder(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def test_every_folder_stands_on_a_floor() -> None:
    assert {folder(name) for name in ARROWS} == set(ORDER)


@pytest.mark.parametrize("name", ARROWS)
def test_arrows_run_down(name: str) -> None:
    mine = ORDER.index(folder(name))
    wrong = [other for other in ARROWS[name] if folder(other) and ORDER.index(folder(other)) > mine]
    if folder(name) == "cli":
        at_top = imports(modules()[name], modules(), lambda tree: tree.body)
        wrong = [other for other in wrong if folder(other) != "integrations" or other in at_top]
    assert not wrong, f"{name} imports {wrong}, which stand above it"
    assert "plait" not in ARROWS[name] or folder(name) == "integrations", f"{name} imports the public face"


@pytest.mark.parametrize("name", [n for n in ARROWS if folder(n) == "integrations"])
def test_an_integration_uses_the_public_face_and_no_other_integration(name: str) -> None:
    part = name.split(".")[2:3]
    others = {other.split(".")[2] for other in ARROWS[name] if folder(other) == "integrations"} - set(part)
    assert not others, f"{name} imports {others}, which are other integrations"
    public = {(module, word) for word, module in vars(plait)["_HOME"].items() if folder(module) != "integrations"}
    for node in ast.walk(ast.parse(modules()[name].read_text(encoding="utf-8"))):
        named = [a.name for a in node.names if (node.module, a.name) in public] if isinstance(node, ast.ImportFrom) else []
        assert not named, f"{name} imports {named} from {getattr(node, 'module', '')}: they are public names of plait"


@pytest.mark.parametrize(
    "name", [n for n in ARROWS if n.startswith("plait.parallel.") and n.split(".")[2] in TECHNIQUES]
)
def test_a_technique_knows_those_before_it(name: str) -> None:
    mine = TECHNIQUES.index(name.split(".")[2])
    others = [o for o in ARROWS[name] if o.startswith("plait.parallel.") and o.split(".")[2] in TECHNIQUES]
    wrong = [o for o in others if TECHNIQUES.index(o.split(".")[2]) > mine]
    assert not wrong, f"{name} imports {wrong}"


def test_no_files_import_each_other_in_a_circle() -> None:
    try:
        tuple(TopologicalSorter(ARROWS).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize(
    "path",
    [
        p
        for p in SOURCE.rglob("*.py")
        if str(p.relative_to(SOURCE)).startswith(WITHOUT_TORCH) and str(p.relative_to(SOURCE)) not in LOADED_LATER
    ],
    ids=str,
)
def test_what_answers_at_once_imports_no_torch(path: Path) -> None:
    top = ast.parse(path.read_text(encoding="utf-8")).body
    names = [n.module for n in top if isinstance(n, ast.ImportFrom)] + [
        a.name for n in top if isinstance(n, ast.Import) for a in n.names
    ]
    assert "torch" not in {str(name).split(".")[0] for name in names}


def test_a_class_name_means_one_thing() -> None:
    seen: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                seen.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert not {name: where for name, where in seen.items() if len(where) > 1}
