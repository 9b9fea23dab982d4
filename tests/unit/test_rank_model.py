"""A rank's state is made once, in `engine/build.py`, and no code assigns it afterwards."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

import plait
from plait.engine import build
from plait.parallel.rank_model import Hooks, RankModel, SplitModel, Techniques
from plait.parallel.rank_setup import RankSetup
from plait.parallel.spec import ParamSpec, Reduce, ShardPlan, Split

SOURCES = Path(plait.__file__).parent
RECORDS = (RankSetup, SplitModel, RankModel, Techniques, Hooks, ShardPlan, ParamSpec, Split, Reduce)
HOLDERS = ("rank_model", "split", "setup", "techniques", "hooks", "table")
"""Names of variables and fields with such a record."""
CHANGING = ("update", "pop", "popitem", "clear", "setdefault")
FIELDS = {field.name for record in RECORDS for field in fields(record)}


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_of_a_rank_is_frozen(record: type) -> None:
    made = object.__new__(record)
    with pytest.raises(FrozenInstanceError):
        setattr(made, next(iter(fields(record))).name, None)


def test_a_rank_has_few_fields() -> None:
    assert len(fields(RankModel)) <= 15


def test_building_a_rank_fits_on_a_page() -> None:
    assert len(inspect.getsource(build.build_rank_model).splitlines()) <= 80


def of_a_record(target: ast.expr) -> bool:
    """Whether an expression is a field of a record: `….techniques.shards`."""
    if not isinstance(target, ast.Attribute) or target.attr not in FIELDS:
        return False
    holder = target.value
    return (holder.id if isinstance(holder, ast.Name) else holder.attr if isinstance(holder, ast.Attribute) else "") in HOLDERS


def changes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, code) of each statement that assigns a field of a record, or changes a dict of it."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [t for target in node.targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
            targets = [node.func.value]
        for target in targets:
            if of_a_record(target.value if isinstance(target, ast.Subscript) else target):
                yield node.lineno, ast.unparse(node)  # type: ignore[attr-defined]


ALLOWED = {"own[name].data.copy_(split.setup.meta_shards.pop(name))", "split.setup.meta_shards.pop(name)"}
"""Parts that are stored temporarily. The code that places them in the model also removes them here, with their memory."""


def test_nobody_assigns_a_ranks_state() -> None:
    found = []
    for path in sorted(SOURCES.rglob("*.py")):
        tree = ast.parse(path.read_text())
        found += [f"{path.relative_to(SOURCES)}:{line} {code}" for line, code in changes(tree) if code not in ALLOWED]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "rank_model.params = {}",
        "self.engine.rank_model.techniques.shards = None",
        "a, split.mesh = 1, 2",
        "rank_model.params['w'] = p",
        "del self.rank_model.params['w']",
        "split.params.pop(name)",
        "self.rank_model.setup.attributes |= more",
    ],
)
def test_the_rule_sees_an_assignment(code: str) -> None:
    assert [*changes(ast.parse(code))]
