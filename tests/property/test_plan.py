"""Any valid plan survives a round trip through a line, TOML and JSON. Anything else is rejected, and never with a traceback."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.config.errors import PlaitError
from plait.config.keys import AXES, KEYS, Key
from plait.config.plan import Plan

CODES = {"T001", "T002", "T003"}


def legal(key: Key) -> st.SearchStrategy:
    if key.choices:
        return st.sampled_from(key.choices).map(key.kind)
    if key.kind is bool:
        return st.booleans()
    if key.kind is float:
        return st.integers(0, 1000).map(lambda n: n / 1000 * key.maximum)
    return st.integers(key.minimum, 2**20)


def with_wildcard(values: dict[str, Any], wild: str | None) -> Plan:
    return Plan(**values | ({wild: 0} if wild else {}))


plans = st.builds(
    with_wildcard,
    st.fixed_dictionaries({name: legal(key) for name, key in KEYS.items()}),
    st.sampled_from((None, *AXES)),
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["*", "fp32", "one", "3"])
)
names = st.sampled_from([*KEYS, "mesh", "step", "memory", "compute"]) | st.text(max_size=5)
trees = st.recursive(scalars, lambda t: st.lists(t, max_size=3) | st.dictionaries(names, t, max_size=4), max_leaves=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


def refused_or_plan(call, *arguments) -> None:
    try:
        assert isinstance(call(*arguments), Plan)
    except PlaitError as error:
        assert set(error.codes) <= CODES
        assert str(error).startswith("error[T00")


@given(plans)
def test_a_line_round_trips(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan
    assert str(Plan.parse(str(plan))) == str(plan)


@given(plans)
def test_toml_round_trips(folder: Path, plan: Plan) -> None:
    path = folder / "plan.toml"
    path.write_text(plan.to_toml(), encoding="utf-8")
    assert Plan.load(path) == plan


@given(plans)
def test_json_round_trips_flat_and_in_tables(folder: Path, plan: Plan) -> None:
    path = folder / "plan.json"
    path.write_text(json.dumps(plan.to_dict()), encoding="utf-8")
    assert Plan.load(path) == plan
    tables: dict[str, dict] = {}
    for name, value in plan.to_dict().items():
        tables.setdefault(KEYS[name].table, {})[name] = value
    path.write_text(json.dumps(tables), encoding="utf-8")
    assert Plan.load(path) == plan


@given(plans, st.randoms(), st.sampled_from([" ", "   ", "\n", "\t "]))
def test_order_and_spaces_mean_nothing(plan: Plan, random, space: str) -> None:
    words = str(plan).split()
    random.shuffle(words)
    assert Plan.parse(space + space.join(words) + space) == plan


@given(plans, st.none() | st.integers(1, 64))
def test_a_filled_plan_fits_its_processes(plan: Plan, nproc: int | None) -> None:
    with suppress(PlaitError):
        filled = plan.fill(nproc)
        assert all(getattr(filled, axis) >= 1 for axis in AXES)
        assert filled.world <= filled.devices + filled.servers
        alike = filled.replica_groups * filled.pp * filled.cp * filled.tp  # ranks of one shard of a group's samples
        assert filled.ranks == (1 if plan.processes == "one" else filled.devices // alike)
        if plan.processes != "one" and nproc is not None:
            assert filled.world == nproc


words = st.lists(st.tuples(names, scalars)).map(lambda rows: " ".join(f"{k}={v}" for k, v in rows))


@pytest.mark.slow
@given(st.text(max_size=60) | words)
def test_any_line_is_a_plan_or_refused(line: str) -> None:
    refused_or_plan(Plan.parse, line)


@given(st.sampled_from(["plan.toml", "plan.json"]), st.binary(max_size=80) | st.text(max_size=80).map(str.encode))
def test_any_bytes_are_a_plan_or_refused(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    refused_or_plan(Plan.load, folder / name)


@given(trees)
def test_any_json_is_a_plan_or_refused(folder: Path, tree) -> None:
    (folder / "tree.json").write_text(json.dumps(tree), encoding="utf-8")
    refused_or_plan(Plan.load, folder / "tree.json")


@given(
    st.lists(st.sampled_from(["zzz=1", "dp=0", "precision=x", "compile=2", "zero_stage=4", "word"]), min_size=1, unique=True)
)
def test_every_fault_is_reported(words: list[str]) -> None:
    with pytest.raises(PlaitError) as caught:
        Plan.parse(" ".join(words))
    expected = ["T001" if word == "zzz=1" else "T002" for word in words]
    assert sorted(caught.value.codes) == sorted(expected)
