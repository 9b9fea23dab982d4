"""Names of the previous version: plan keys, options and values are accepted with a warning, and old files are read without one."""

import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import jobs
import pytest

import plait
from plait.cli import main
from plait.config import command_options as of
from plait.config.command_options import list_options
from plait.config.errors import PlaitError
from plait.config.former_names import FormerName
from plait.config.keys import FORMER_KEYS, KEYS
from plait.config.plan import Plan

OPTIONS = [
    (command, option) for command in vars(of).values() if isinstance(command, type) and issubclass(command, of.CommandOptions)
    for option in list_options(command).values() if option.former or option.former_values
]  # fmt: skip


def example(key: str) -> str:
    """A value of a plan key that is not its default."""
    found, usual = KEYS[key], str(getattr(Plan, key))
    return next((choice for choice in found.choices if choice != usual), str(found.minimum + 2))


@pytest.mark.parametrize("former", FORMER_KEYS)
def test_a_plan_is_read_by_the_former_name_of_a_key(former: str, tmp_path: Path) -> None:
    now = FORMER_KEYS[former]
    value = example(now)
    right = Plan.parse(f"{now}={value}")
    with pytest.warns(FormerName, match=f"plan key {former} is now called {now};"):
        assert Plan.parse(f"{former}={value}") == right
    file = tmp_path / "plan.toml"
    table = KEYS[now].table
    file.write_text(f"[{table}]\n{former} = {value if value.isdecimal() else repr(value)}\n")
    with pytest.warns(FormerName):
        assert Plan.load(file) == right
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Plan.stored(f"{former}={value}") == Plan.stored(file) == right
    assert str(right).startswith(f"{now}=") and f"\n{former} = " not in right.to_toml()


def test_both_names_of_a_key_are_one_key() -> None:
    with pytest.warns(FormerName), pytest.raises(PlaitError, match="`sync_every` is given twice"):
        Plan.parse("replica_groups=2 sync_every=4 every=8")


def test_a_key_is_explained_by_its_former_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["help", "recompute"]) == 0
    assert "activation_checkpointing" in capsys.readouterr().out


@pytest.mark.parametrize("command, option", OPTIONS, ids=lambda it: it.name if isinstance(it, of.Option) else it.__name__)
def test_no_former_name_is_a_present_one(command: type[of.CommandOptions], option: of.Option) -> None:
    names = {each.name for each in fields(command)}
    assert option.former not in names and not set(option.former_values) & set(option.choices)
    assert set(option.former_values.values()) <= set(option.choices)


def test_former_options_on_the_command_line() -> None:
    words = ["train", "job.py", "--restarts", "5", "--fewer", "--patience=60", "--ranks", "0,1", "--to", "wandb", "--to=mlflow", "--save", "all"]
    with pytest.warns(FormerName) as warned:
        _, given = main.parse_command_line(words)
    assert isinstance(given, of.TrainOptions)
    assert (given.max_restarts, given.allow_shrink, given.hang_timeout, given.log_ranks) == (5, True, 60.0, "0,1")
    assert given.tracker == ("wandb", "mlflow") and given.checkpoint_params == "all"
    said = {str(each.message).partition(";")[0] for each in warned}
    assert "option --restarts is now called --max-restarts" in said and len(said) == 6


def test_a_former_value_of_an_option() -> None:
    with pytest.warns(FormerName, match="value --objective fewest is now called min-devices"):
        _, given = main.parse_command_line(["plan", "job.py", "--objective", "fewest", "--deadline", "24h"])
    assert isinstance(given, of.PlanOptions) and given.objective == "min-devices"


def test_a_warning_is_a_note_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main.main(["plan", "nowhere.py", "--pin", "tp=1"]) == 2
    said = capsys.readouterr().err
    assert said.count("note  option --pin is now called --set") == 1 and "FormerName" not in said


def test_former_options_in_python(tmp_path: Path) -> None:
    options: dict[str, Any] = {"runs": tmp_path, "steps": 2, "check": "none", "quiet": True}
    with pytest.warns(FormerName, match="option restarts is now called max_restarts"):
        run = plait.train(jobs.mlp, "dp=1", restarts=0, **options)
    assert not run.stopped
