"""docs/matrix.md has the rows and columns of its generator, and no empty cell. A few cells run again."""

import importlib.util
from itertools import combinations
from pathlib import Path
from types import ModuleType

import pytest
from rarely import rarely

from plait.config.keys import AXES
from plait.config.plan import Plan

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "matrix.md").read_text(encoding="utf-8") if (DOCS / "matrix.md").exists() else ""


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("matrix", DOCS / "matrix.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MATRIX = generator()


def test_every_axis_and_every_pair_is_a_column() -> None:
    assert {*MATRIX.AXES} == {*AXES, "ep"} - {"replica_groups"}  # changes the training result: tests/exact/test_replica_groups.py
    assert len(MATRIX.COLUMNS) == 6 + len([*combinations(MATRIX.AXES, 2)])
    for column in MATRIX.COLUMNS:
        plan = Plan.parse(MATRIX.plan(column))
        assert plan.world in (2, 4) and all(getattr(plan, axis) > 1 for axis in column.split("+"))


def test_every_cell_was_run() -> None:
    cells = MATRIX.written(TEXT)
    empty = [(row, column) for row in MATRIX.features() for column in MATRIX.COLUMNS if (row, column) not in cells]
    assert not empty, f"run  docs/generate.py matrix --missing: {empty}"
    assert {row for row, _ in cells} == {*MATRIX.features()}


def test_the_document_is_what_its_cells_render() -> None:
    version = TEXT.partition("torch ")[2].partition(",")[0]
    assert MATRIX.render(MATRIX.written(TEXT), [*MATRIX.features()], version) == TEXT


def test_notes_are_short_and_explain_every_cell_that_is_not_equal() -> None:
    for pair, (symbol, note) in MATRIX.written(TEXT).items():
        assert (symbol == MATRIX.EQUAL) == (not note) and len(note) <= 240, pair


@pytest.mark.slow
@pytest.mark.parametrize(
    "row, column",
    (
        ("scalar parameters", "fsdp"),
        *rarely(("buffers: power iteration, counter", "pp"), ("layers dropped by Python's random", "pp")),
    ),
)
def test_a_cell_again(row: str, column: str) -> None:
    assert MATRIX.cell(MATRIX.features()[row](), column) == MATRIX.written(TEXT)[row, column]
