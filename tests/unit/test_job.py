"""Loading a job: every possible mistake in a user's file has a code, and the error names the user's own file and line."""

import sys
from pathlib import Path

import pytest

from plait import Evaluate, Job
from plait.config.errors import PlaitError, Problem
from plait.config.job import load_job

HEAD = """
from typing import Literal, Optional
import plait
SEEN = {}
def make(**fields):
    good = dict(model=int, loss=int, data=int, optimizer=int, batch=1, steps=1)
    return plait.Job(**(good | fields))
"""
LINE = HEAD.count("\n")
"""Lines before a test's own text."""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", sys.path[:])

    def write(text: str, name: str = "work.py", head: str = HEAD) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(head + text, encoding="utf-8")
        return str(path)

    return write


def problems(name: str, arguments: dict[str, str] | None = None) -> list[Problem]:
    with pytest.raises(PlaitError) as caught:
        load_job(name, arguments)
    assert caught.value.exit_code == 2
    return list(caught.value.problems)


def only(name: str, arguments: dict[str, str] | None = None) -> Problem:
    (problem,) = problems(name, arguments)
    return problem


def test_a_job_by_its_file_and_by_a_function(write) -> None:
    path = write("def job():\n    return make(batch=2)\ndef big(n: int = 3):\n    return make(batch=n)\n")
    assert load_job(path).batch == 2
    assert load_job(f"{path}:big").batch == 3
    assert load_job(f"{path}:big", {"n": "7"}).batch == 7
    assert load_job(f"{path}:").batch == 2


def test_a_job_imports_its_neighbours(write) -> None:
    write("BATCH = 5\n", "neighbour_of_work.py", head="")
    assert (
        load_job(write("import neighbour_of_work\ndef job():\n    return make(batch=neighbour_of_work.BATCH)\n")).batch
        == 5
    )


@pytest.mark.parametrize("name", ["no/such/job.py", "", ".", "/", "a\0b", ":job", "nothing.py:job"])
def test_no_such_file(name: str) -> None:
    problem = only(name)
    assert problem.code == "J001"
    assert str(Path.cwd()) in problem.why
    assert problem.fix


def test_a_missing_file_shows_its_neighbours(write) -> None:
    near = write("")
    assert near in only(str(Path(near).with_name("worm.py"))).fix


def test_a_name_too_long_for_a_file() -> None:
    assert only("x" * 5000).code == "J001"


def test_a_file_that_is_not_python(write) -> None:
    assert only(write("def job(): return make()\n", "job.txt")).code in ("J001", "J003")


def test_no_such_function(write) -> None:
    path = write("def jobb():\n    return make()\n")
    problem = only(path)
    assert (problem.code, problem.where) == ("J002", path)
    assert "did you mean  jobb ?" in problem.what
    assert "`zzz`" in only(f"{path}:zzz").what
    assert only(write("job = make()\n", "value.py")).code == "J002"
    assert "def job()" in only(write("", "empty.py", head="")).what


@pytest.mark.parametrize(
    ("text", "what", "line", "function"),
    [
        ("1 / 0\n", "ZeroDivisionError: division by zero", 1, "<module>"),
        ("raise SystemExit(3)\n", "SystemExit: 3", 1, "<module>"),
        ("import os; os._exit(0)\n", "SystemExit: os._exit(0)", 1, "<module>"),
        ("import no_such_module_at_all\n", "ModuleNotFoundError", 1, "<module>"),
        (
            "def job():\n    def inner():\n        raise ValueError('x\\ny')\n    inner()\n",
            "ValueError: x",
            3,
            "inner",
        ),
        ("import torch\ndef job():\n    torch.zeros(2) + torch.zeros(3)\n", "RuntimeError", 3, "job"),
        ("def job():\n    return plait.Job(model=int)\n", "TypeError", 2, "job"),
    ],
)
def test_where_the_users_code_raised(write, text: str, what: str, line: int, function: str) -> None:
    path = write(text)
    problem = only(path)
    assert problem.code == "J003"
    assert what in problem.what
    assert "\n" not in problem.what
    assert problem.where == f"{path}:{LINE + line} in {function}"


def test_what_is_not_python_at_all(write, tmp_path: Path) -> None:
    path = write("def job(:\n")
    assert (only(path).code, only(path).where) == ("J003", f"{path}:{LINE + 1}")
    for content in (b"\xff\xfe", b"def job():\0"):
        (tmp_path / "bytes.py").write_bytes(content)
        assert only(str(tmp_path / "bytes.py")).code == "J003"
        assert str(tmp_path / "bytes.py") in only(str(tmp_path / "bytes.py")).where


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["plait/examples", "lib/python/mine"])
def test_where_in_a_folder_with_an_unlucky_name(write, folder: str) -> None:
    path = write("def job():\n    1 / 0\n", f"{folder}/work.py")
    assert only(path).where == f"{path}:{LINE + 2} in job"


def test_where_eval_raised(write) -> None:
    path = write("def job():\n    eval('1+')\n")
    assert only(path).where.startswith(path)


def test_the_users_interrupt_passes(write) -> None:
    with pytest.raises(KeyboardInterrupt):
        load_job(write("raise KeyboardInterrupt\n"))


@pytest.mark.parametrize(("value", "kind"), [("None", "NoneType"), ("3", "int"), ("make", "function"), ("{}", "dict")])
def test_a_job_that_returns_something_else(write, value: str, kind: str) -> None:
    problem = only(write(f"def job():\n    return {value}\n"))
    assert problem.code == "J003"
    assert kind in problem.what


def test_two_jobs_whose_neighbours_have_one_name(write) -> None:
    """Each job imports its own module, whichever was loaded earlier in this process."""
    body = "import neighbour_of_two\ndef job():\n    return make(batch=neighbour_of_two.BATCH)\n"
    paths = []
    for folder, batch in (("one", 5), ("two", 7)):
        write(f"BATCH = {batch}\n", f"{folder}/neighbour_of_two.py", head="")
        paths.append(write(body, f"{folder}/work.py"))
    assert [load_job(path).batch for path in (*paths, *paths)] == [5, 7, 5, 7]


def test_all_wrong_fields_at_once(write) -> None:
    wrong = "model=3, loss=None, batch=0, steps='x', weight=2, schedule='a', clip=-1, seed=-1, evaluate=3"
    found = problems(write(f"def job():\n    return make({wrong})\n"))
    assert {p.code for p in found} == {"J004"}
    assert [p.what.split("(")[1].split("=")[0] for p in found] == [
        *("model", "batch", "steps", "weight", "schedule", "clip", "seed", "evaluate", "loss")
    ]


@pytest.mark.parametrize(
    "field", ["batch=True", "batch=2.0", "seed=2**63", "seed=True", "clip=float('nan')", "clip=0", "steps=0"]
)
def test_one_wrong_field(write, field: str) -> None:
    assert field.split("=")[0] in only(write(f"def job():\n    return make({field})\n")).what


def test_a_wrong_evaluate_is_refused() -> None:
    with pytest.raises(PlaitError):
        Job(
            model=int,
            loss=int,
            data=int,
            optimizer=int,
            batch=1,
            steps=1,
            evaluate=Evaluate(data=3, metrics=None, every=-1),
        )  # type: ignore[arg-type]


CONVERSIONS = {
    "x: int": ("-3", -3), "x: float": ("1e-3", 1e-3), "x: float = 1": ("2", 2.0), "x: str": ("3", "3"),
    "x: bool": ("yes", True), "x: bool = True": ("0", False), "x=2": ("5", 5), "x=2.0": ("5", 5.0), "x='a'": ("5", "5"),
    "x=False": ("true", True), "x": ("5", "5"), "x=None": ("5", "5"), "x: Optional[int] = 3": ("5", 5),
    "x: int | None = 3": ("5", 5), "x: int | None = None": ("5", 5), "x: Optional[float] = None": ("5", 5.0),
    "x: 'int'": ("5", 5), "x: Literal['a', 'b'] = 'a'": ("b", "b"),
}  # fmt: skip


@pytest.mark.parametrize("parameter", CONVERSIONS)
def test_arguments_are_converted(write, parameter: str) -> None:
    path = write(f"def job({parameter}):\n    SEEN['x'] = x\n    return make()\n", "converted.py")
    text, expected = CONVERSIONS[parameter]
    load_job(path, {"x": text})
    seen = sys.modules["plait_job_converted"].SEEN["x"]
    assert seen == expected
    assert type(seen) is type(expected)


@pytest.mark.parametrize(
    ("parameter", "text"), [("x: int", "1.5"), ("x: float", "a"), ("x: bool", "maybe"), ("x=2", "")]
)
def test_arguments_that_do_not_convert(write, parameter: str, text: str) -> None:
    problem = only(write(f"def job({parameter}):\n    return make()\n"), {"x": text})
    assert problem.code == "J005"
    assert "--job.x" in problem.what


@pytest.mark.parametrize("annotation", ["torch.dtype = torch.float32", "Any = 3"])
def test_arguments_of_a_type_without_text(write, annotation: str) -> None:
    path = write(f"import torch\nfrom typing import Any\ndef job(x: {annotation}):\n    return make()\n")
    try:
        load_job(path, {"x": "bfloat16"})
    except PlaitError as error:
        assert error.codes == ["J005"]


def test_all_wrong_arguments_at_once(write) -> None:
    path = write("def job(depth: int, width: int, rate: float = 0.1):\n    return make()\n")
    found = problems(path, {"dept": "3", "rate": "x"})
    assert [p.code for p in found] == ["J005"] * 4
    text = "\n".join(p.what for p in found)
    for part in (
        "--job.dept ",
        "did you mean  --job.depth ?",
        "--job.rate x",
        "--job.width is missing",
        "--job.depth is missing",
    ):
        assert part in text
    assert "takes no arguments" in only(write("def job():\n    return make()\n"), {"x": "1"}).what


def test_dashes_are_underscores(write) -> None:
    path = write("def job(n_layers: int):\n    return make(batch=n_layers)\n")
    assert load_job(path, {"n-layers": "4"}).batch == 4


@pytest.mark.slow
def test_a_wrong_argument_with_a_dash_is_one_problem(write) -> None:
    assert "expected int" in only(write("def job(n_layers: int):\n    return make()\n"), {"n-layers": "x"}).what
