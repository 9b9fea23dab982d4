"""The format of an error: what, why, where, fix, one code. Several errors at once, and a page for every code."""

import ast
import pickle
import re
from pathlib import Path

import pytest

import plait
from plait.config.errors import FAILED, USAGE, PlaitError, Problem, did_you_mean, explain
from plait.launch import failures

SOURCE = Path(plait.__file__).parent
CODE = re.compile(r'"([A-Z]\d{3})"')


def test_the_form_of_a_problem() -> None:
    problem = Problem(
        "P001", "the plan needs 2", why="2 × 1 = 2\nnot 3", where="p.toml", fix=("--nproc 2", '--plan "dp=3"')
    )
    assert str(problem).splitlines() == [
        "error[P001] the plan needs 2",
        "  why    2 × 1 = 2",
        "         not 3",
        "  where  p.toml",
        "  fix    --nproc 2",
        '         --plan "dp=3"',
    ]
    assert str(Problem("X001", "only what")) == "error[X001] only what"
    assert str(Problem("X001", "and a fix", fix=("do it",))) == "error[X001] and a fix\n  fix    do it"


def test_several_problems_are_one_error() -> None:
    problems = [Problem("A001", "a"), Problem("B002", "b", why="c")]
    for given in (problems, tuple(problems), iter(problems)):
        error = PlaitError(given)
        assert error.codes == ["A001", "B002"]
        assert str(error) == "error[A001] a\n\nerror[B002] b\n  why    c"
        assert error.exit_code == USAGE == 2
    assert PlaitError(problems[0], FAILED).exit_code == 1
    assert PlaitError(problems[0]).problems == (problems[0],)


def test_an_error_travels_between_processes() -> None:
    error = PlaitError([Problem("A001", "a", fix=("x",)), Problem("B002", "b")], FAILED, "Traceback …")
    again = pickle.loads(pickle.dumps(error))
    assert (again.problems, again.exit_code, again.trace, str(again)) == (error.problems, 1, "Traceback …", str(error))


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("microbatch", "did you mean  microbatches ?"),
        ("pd", "did you mean  dp ?"),
        ("zzz", "known: dp, microbatches"),
        ("", "known: dp, microbatches"),
        ("d" * 10_000, "known: dp, microbatches"),
    ],
)
def test_did_you_mean(word: str, expected: str) -> None:
    assert did_you_mean(word, ("dp", "microbatches")) == expected


def codes_in_the_source() -> set[str]:
    return {code for path in SOURCE.rglob("*.py") for code in CODE.findall(path.read_text(encoding="utf-8"))}


def test_every_code_has_its_page_and_every_page_its_code() -> None:
    pages = re.findall(r"^## (\w+)", (SOURCE / "errors.md").read_text(encoding="utf-8"), re.M)
    assert len(pages) == len(set(pages))
    assert codes_in_the_source() <= set(pages)


def test_explain() -> None:
    for code in sorted(codes_in_the_source()):
        text = explain(code)
        assert text is not None
        assert text.startswith(code)
        assert len(text.splitlines()) > 1
        assert "\n## " not in text
    assert explain("Z999") is None
    assert explain("") is None
    assert explain("the") is None


def test_an_empty_fix_does_not_hide_the_problem() -> None:
    assert "error[A001] a" in str(Problem("A001", "a", fix=("",)))


@pytest.mark.slow
def test_refusals_exit_with_2_wherever_they_are_found() -> None:
    used: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for call in (c for c in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(c, ast.Call)):
            if ast.unparse(call.func) == "PlaitError" and "FAILED" in map(ast.unparse, call.args[1:]):
                used |= set(re.findall(r"'(P\d{3})'", ast.unparse(call.args[0])))
    in_mid_run = {"P026", "P093", "P094"}
    assert used == in_mid_run, "these say that the run failed, not that the plan does not fit"


def test_a_file_of_a_library_is_named_as_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from a virtual environment in the folder of the job."""
    monkeypatch.setattr("sys.path", ["", "/home/job", "/home/job/.venv/lib", "/home"])
    assert failures._strip_import_root("/home/job/.venv/lib/torch/nn/functional.py") == "torch/nn/functional.py"
    assert failures._strip_import_root("/home/job/train.py") == "train.py"
    assert failures._strip_import_root("/elsewhere/x.py") == "/elsewhere/x.py"
