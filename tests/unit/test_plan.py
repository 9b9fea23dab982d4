"""The plan: the same keys as a line, a TOML file and JSON. All errors are reported at once, and no input hangs the parser."""

import json
import time
from dataclasses import fields
from pathlib import Path

import pytest

from plait.config.conflicts import find_ineffective_keys
from plait.config.errors import PlaitError, Problem
from plait.config.keys import AXES, KEYS
from plait.config.plan import Plan


def problems(call, *arguments) -> list[Problem]:
    """The errors of `call`, which must come within a second."""
    began = time.perf_counter()
    with pytest.raises(PlaitError) as caught:
        call(*arguments)
    text = str(caught.value)
    assert time.perf_counter() - began < 1.0
    assert len(text) < 2_000_000
    return list(caught.value.problems)


def codes(found: list[Problem]) -> list[str]:
    return [p.code for p in found]


@pytest.fixture
def file(tmp_path: Path):
    def write(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_a_line_says_what_it_changes() -> None:
    plan = Plan.parse("  microbatches=3   dp=2 ")
    assert plan == Plan(dp=2, microbatches=3)
    assert str(plan) == "dp=2 microbatches=3"
    assert str(Plan()) == "dp=1"
    assert Plan.parse("") == Plan()
    assert str(Plan.parse("dp=* compile=true")) == "dp=* compile=true"


def test_files_take_tables_and_bare_keys(file) -> None:
    expected = Plan(dp=4, microbatches=2, precision="bf16")
    tables = '[mesh]\ndp = 4\n[step]\nmicrobatches = 2\n[compute]\nprecision = "bf16"\n'
    assert Plan.load(file("a.toml", tables)) == expected
    assert Plan.load(file("b.toml", 'dp = 4\nmicrobatches = 2\nprecision = "bf16"\n')) == expected
    assert (
        Plan.load(file("c.json", json.dumps({"mesh": {"dp": 4}, "microbatches": 2, "compute": {"precision": "bf16"}})))
        == expected
    )
    assert Plan.load(file("d.toml", "")) == Plan()


def test_read_tells_a_file_from_a_line(file) -> None:
    assert Plan.read(str(file("p.toml", "dp = 3"))) == Plan.read("dp=3") == Plan(dp=3)
    (problem,) = problems(Plan.read, "no/such.toml")
    assert problem.code == "T003"
    assert "no/such.toml" in problem.what


def test_the_counts() -> None:
    assert (Plan(dp=3).devices, Plan(dp=3).world, Plan(dp=3).ranks) == (3, 3, 3)
    one = Plan(dp=3, processes="one")
    assert (one.devices, one.world, one.ranks) == (3, 1, 1)


def test_the_wildcard_is_filled() -> None:
    assert Plan.parse("dp=*").fill(None) == Plan(dp=1)
    assert Plan.parse("dp=*").fill(4) == Plan(dp=4)
    assert Plan(dp=4).fill(4) == Plan(dp=4).fill(None) == Plan(dp=4)
    (problem,) = problems(Plan(dp=2).fill, 3)
    assert problem.code == "P001"
    assert "2 processes" in problem.what
    assert "the run has 3" in problem.what
    assert "--nproc 2" in problem.fix
    assert '--plan "dp=3"' in problem.fix


def test_the_wildcard_of_either_axis_is_filled() -> None:
    assert Plan.parse("fsdp=*").fill(None) == Plan(fsdp=1)
    assert Plan.parse("fsdp=*").fill(4) == Plan(fsdp=4)
    assert Plan.parse("dp=2 fsdp=*").fill(6) == Plan.parse("dp=* fsdp=3").fill(6) == Plan(dp=2, fsdp=3)
    assert Plan.parse("dp=2 fsdp=*").fill(None) == Plan(dp=2)
    assert Plan(dp=2, fsdp=3).devices == Plan(dp=2, fsdp=3).world == Plan(dp=2, fsdp=3).ranks == 6


@pytest.mark.parametrize(
    ("line", "nproc", "needs", "why", "fixes"),
    [
        ("dp=2 fsdp=2", 8, "4 processes", "dp=2 × fsdp=2 = 4 processes", ["dp=4 fsdp=2", "dp=* fsdp=2"]),
        ("dp=2 fsdp=3", 8, "6 processes", "dp=2 × fsdp=3 = 6 processes", ["dp=2 fsdp=4", "dp=2 fsdp=*"]),
        ("dp=2 fsdp=3", 7, "6 processes", "dp=2 × fsdp=3 = 6 processes", []),
        ("fsdp=3", 4, "3 processes", "fsdp=3 = 3 processes", ["fsdp=4", "fsdp=*"]),
        ("dp=2 fsdp=*", 3, "2 processes", "dp=2 = 2 processes", ["dp=3", "dp=*"]),
        ("dp=* fsdp=4", 2, "4 processes", "fsdp=4 = 4 processes", ["fsdp=2", "fsdp=*"]),
        ("fsdp=2", 1, "2 processes", "fsdp=2 = 2 processes", ["dp=1", "fsdp=*"]),
        ("dp=2 processes=one", 3, "1 process", "threads of processes=one = 1 process", ["dp=3", "dp=*"]),
    ],
)
def test_counts_that_do_not_agree(line: str, nproc: int, needs: str, why: str, fixes: list[str]) -> None:
    (problem,) = problems(Plan.parse(line).fill, nproc)
    assert problem.code == "P001"
    assert f"the plan needs {needs}, and the run has {nproc}" in problem.what
    assert problem.why == why
    assert problem.fix[0] == f"--nproc {needs.split()[0]}"
    proposed = [fix.split('"')[1] for fix in problem.fix[1:]]
    assert proposed == fixes
    assert all(Plan.parse(fix).fill(nproc).world == nproc for fix in proposed)


def test_only_one_axis_fills_the_rest(file) -> None:
    for found in (problems(Plan.parse, "dp=* fsdp=*"), problems(Plan.load, file("p.toml", 'dp = "*"\nfsdp = "*"'))):
        (problem,) = found
        assert problem.code == "T002"
        assert "dp=* and fsdp=*: only one axis can use the remaining ranks" in problem.what
        assert problem.fix == ("dp=*", "fsdp=*")


def test_the_stage_of_zero_is_one_of_three(file) -> None:
    assert [Plan.parse(f"zero_stage={n}").zero_stage for n in (1, 2, 3)] == [1, 2, 3]
    assert Plan.load(file("p.toml", "[memory]\nzero_stage = 2\n")) == Plan(zero_stage=2)
    (problem,) = problems(Plan.parse, "zero_stage=4")
    assert problem.code == "T002"
    assert "zero_stage = 4        expected 1, 2 or 3" in problem.what
    for value in ("0", "-1", "true", '"3"', "3.0", "[3]", "0x" + "f" * 5000):
        assert codes(problems(Plan.load, file("p.toml", f"zero_stage = {value}\n"))) == ["T002"]


def test_the_keys_are_the_fields_of_a_plan() -> None:
    assert list(KEYS) == [field.name for field in fields(Plan)]
    for name, key in KEYS.items():
        default = getattr(Plan(), name)
        assert type(default) is key.kind
        assert not key.choices or str(default) in key.choices
    assert all(KEYS[axis].table == "mesh" for axis in AXES)


WRONG = [
    "dp",
    "dp=",
    "dp=0",
    "dp=-1",
    "dp=2.0",
    "dp=true",
    "dp=2 dp=3",
    f"dp={2**20 + 1}",
    "dp=\0",
    "microbatches=*",
]
WRONG += ["microbatches=two", "precision=bf61", "precision=FP32", "compile=yes", "compile=1", "processes=two"]
WRONG += ["zero_stage=4", "zero_stage=0", "zero_stage=*", "activation_checkpointing=some", "offload=disk", "fsdp=0", "dp=* fsdp=*"]


@pytest.mark.parametrize("line", [*WRONG, "dpp=2", "=3"])
def test_a_wrong_line_has_its_code_and_its_place(line: str) -> None:
    found = problems(Plan.parse, line)
    assert codes(found) == ["T002" if line in WRONG else "T001"]
    assert line in found[0].where
    assert found[0].what


def test_all_faults_of_a_line_come_together() -> None:
    found = problems(Plan.parse, "ddp=2 microbatch=3 precision=bf61 compile=maybe words dp=0")
    assert sorted(codes(found)) == ["T001", "T001", "T002", "T002", "T002", "T002"]
    text = "\n".join(p.what for p in found)
    for hint in (
        "did you mean  dp ?",
        "did you mean  microbatches ?",
        "did you mean  bf16 ?",
        "true or false",
    ):
        assert hint in text


def test_an_unlike_key_lists_what_is_known() -> None:
    (problem,) = problems(Plan.parse, "zzz=1")
    assert all(key in problem.what for key in KEYS)


def test_all_faults_of_a_file_come_together(file) -> None:
    path = file("p.toml", '[stp]\nmicrobatches=2\n[step]\ndp=2\nfoo=1\n[compute]\nprecision="bf61"\ncompile=3\n')
    found = problems(Plan.load, path)
    assert sorted(codes(found)) == ["T001", "T001", "T001", "T002", "T002"]
    text = "\n".join(str(p) for p in found)
    for hint in (
        "did you mean  step ?",
        "`dp` belongs in [mesh]",
        "[mesh] dp = 2",
        "foo",
        "did you mean  bf16 ?",
    ):
        assert hint in text
    assert all(str(path) in p.where for p in found)


def test_what_cannot_be_read(file, tmp_path: Path) -> None:
    for content in ("dp = ", "[mesh\n", "dp = 1\0", b"\xff\xfe", b'dp = "\xc3"'):
        assert codes(problems(Plan.load, file("p.toml", content))) == ["T003"]
    for content in ("{", "[]", "3", "null", '"dp=2"', b"\xff"):
        assert codes(problems(Plan.load, file("p.json", content))) == ["T003"]
    assert codes(problems(Plan.load, tmp_path)) == ["T003"]
    assert codes(problems(Plan.load, "x" * 5000)) == ["T003"]


@pytest.mark.parametrize(
    "value", ["1.0", "nan", "true", '"2"', "[2]", "{a=1}", "1979-05-27T07:32:00Z", "0", "-3", "9" * 4000]
)
def test_wrong_types_in_a_file(file, value: str) -> None:
    assert codes(problems(Plan.load, file("p.toml", f"[step]\nmicrobatches = {value}\n"))) == ["T002"]


@pytest.mark.parametrize(
    "content", ["mesh = 3\n", "[[mesh]]\ndp = 2\n", "[precision]\ndp = 2\n", "[mesh.step]\ndp = 2\n"]
)
def test_tables_in_the_wrong_place(file, content: str) -> None:
    assert set(codes(problems(Plan.load, file("p.toml", content)))) == {"T001"}


def test_a_table_without_brackets_is_told_apart_from_a_typo(file) -> None:
    (problem,) = problems(Plan.load, file("p.toml", "mesh = 3\n"))
    assert "did you mean  mesh" not in problem.what


def test_a_key_given_in_two_places_is_refused(file) -> None:
    assert problems(Plan.load, file("p.json", '{"dp": 1, "mesh": {"dp": 2}}'))


def test_a_wildcard_survives_json(file) -> None:
    assert Plan.load(file("p.json", json.dumps(Plan(dp=0).to_dict()))) == Plan(dp=0)


HOSTILE = {
    "brackets.toml": "dp = " + "[" * 100_000,
    "braces.toml": "dp = " + "{a=" * 30_000,
    "brackets.json": "[" * 100_000,
    "nested.json": '{"dp":' + "[" * 900 + "]" * 900 + "}",
    "objects.json": '{"a":' * 20_000,
    "string.json": json.dumps({"precision": "f" * 100_000}),
    "keys.json": json.dumps({f"k{i}": 1 for i in range(3000)}),
    "huge_int.toml": "[mesh]\ndp = " + "9" * 100_000,
    "huge_int.json": '{"mesh": {"dp": ' + "9" * 100_000 + "}}",
    "huge_hex.toml": "[mesh]\ndp = 0x" + "f" * 100_000,
    "huge_choice.toml": "[memory]\nzero_stage = 0x" + "f" * 8000,
    "huge_hex_elsewhere.toml": "[step]\ndp = 0x" + "f" * 100_000,
    "deep_table.toml": "[mesh." + "a." * 1500 + "a]",
    "deep_value.toml": "dp." + "a." * 1500 + "a = 1",
    "deeper_value.toml": "dp." + "a." * 50_000 + "a = 1",
}


def named(names) -> list:
    return [pytest.param(name, id=ascii(name)[1:20]) for name in names]


@pytest.mark.parametrize("name", named(HOSTILE))
def test_hostile_files_are_refused_quickly(file, name: str) -> None:
    assert set(codes(problems(Plan.load, file(name, HOSTILE[name])))) <= {"T001", "T002", "T003"}


LINES = {
    "words": "a " * 20_000,
    "twice": "dp=1 " * 20_000,
    "keys": " ".join(f"k{i}=1" for i in range(12_000)),
    "value": "precision=" + "f" * 100_000,
    "key": "p" * 100_000 + "=1",
    "digits": "dp=" + "9" * 100_000,
}


@pytest.mark.parametrize("name", named(LINES))
def test_hostile_lines_are_refused_quickly(name: str) -> None:
    assert codes(problems(Plan.parse, LINES[name])) == ["T003"]


@pytest.mark.parametrize("path", named(["a\0b", "\ud800", "a" * 5000, "."]))
def test_hostile_paths(path: str) -> None:
    assert codes(problems(Plan.read, path)) == ["T003"]


@pytest.mark.parametrize("text", ("zero_stage=2", "dp=2 schedule=gpipe", "stages_per_rank=2 fsdp=2"))
def test_a_key_without_effect_is_refused(text: str) -> None:
    assert codes(find_ineffective_keys(Plan.parse(text))) == ["P030"]


@pytest.mark.parametrize("text", ("", "fsdp=2 zero_stage=2", "pp=2 schedule=gpipe", "zero_stage=2 offload=all"))
def test_a_key_with_effect_is_not(text: str) -> None:
    assert find_ineffective_keys(Plan.parse(text)) == []


@pytest.mark.parametrize(
    "given", ("compile=true", "dp=2 compile=true precision=bf16", "tp=2 compile=true", "tp=2 dp=2")
)
def test_the_uncompiled_plan_is_a_plan_that_can_be_given(given: str) -> None:
    """Dry runs of compiled plans run the uncompiled plan, and a plan in which a key has no effect is rejected."""
    plan = Plan.parse(given)
    assert not plan.uncompiled.compile and not find_ineffective_keys(plan.uncompiled)
    assert Plan.parse(str(plan.uncompiled)) == plan.uncompiled
    assert plan.tp == 1 or plan.uncompiled.uses_sequence_shards is plan.uses_sequence_shards
