"""Invalid user input: each case has the right exit code, what, why and fix, no traceback, within two seconds.

The seconds are processor time of the command and the processes that it started, after torch is imported.
"""

import os
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
from rarely import sampled

from plait.cli.main import main

SECONDS = 6.0
JOBS = str(Path(__file__).parents[1] / "jobs_wrong.py")


@dataclass
class Answer:
    """The result of a command."""

    code: int
    output: str
    seconds: float


def answer(argv: list[str], folder: Path) -> Answer:
    """Runs one command line in a child of this process, which has imported torch."""
    log = folder / "answer.log"
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.setsid()
            os.chdir(folder)
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            warnings.resetwarnings()
            sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
            code = main(argv)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status, used = os.wait4(pid, 0)
    return Answer(os.waitstatus_to_exitcode(status), log.read_text(), used.ru_utime + used.ru_stime)


def of(name: str, *argv: str) -> list[str]:
    return ["train", f"{JOBS}:{name}", *argv]


J = of("job")
WRONG: list[tuple[list[str], int, str]] = [
    # the command line
    ([], 2, "U001"),
    (["trian", JOBS], 2, "U001 did you mean  train ?"),
    (["verfy", JOBS], 2, "U001 did you mean  verify ?"),
    (["train"], 2, "U001"),
    ([*J, "--nprc", "2"], 2, "U001 did you mean  --nproc ?"),
    ([*J, "--pln", "dp=2"], 2, "U001 did you mean  --plan ?"),
    ([*J, "dp=2"], 2, "U001 unexpected argument `dp=2`"),
    ([*J, "--nproc", "0"], 2, "U002 --nproc 0"),
    ([*J, "--nproc", "two"], 2, "U001 invalid int value"),
    ([*J, "--steps", "0"], 2, "U002 --steps 0"),
    ([*J, "--batch", "-8"], 2, "U002 --batch -8"),
    ([*J, "--save-every", "0"], 2, "U002 --save-every 0"),
    ([*J, "--keep", "0"], 2, "U002 --keep 0"),
    ([*J, "--workers", "-1"], 2, "U002 --workers -1"),
    ([*J, "--log-ranks", "7"], 2, "U002 --log-ranks 7"),
    ([*J, "--log-ranks", "a,b"], 2, "U002 --log-ranks a,b"),
    ([*J, "--hang-timeout", "0"], 2, "U002 --hang-timeout 0"),
    ([*J, "--hang-timeout", "nan"], 2, "U002 --hang-timeout nan"),
    ([*J, "--scale-lr", "linear"], 2, "U002 --scale-lr linear needs --batch"),
    ([*J, "--scale-lr", "cubic", "--batch", "8"], 2, "U001 invalid choice: 'cubic'"),
    ([*J, "--device", "tpu"], 2, "U001 invalid choice: 'tpu'"),
    ([*J, "--tracker", "aim"], 2, "U002 --tracker aim: unknown tracker"),
    ([*J, "--job.widht", "8"], 2, "J005 did you mean  --job.width ?"),
    ([*J, "--job.width", "eight"], 2, "J005 expected int"),
    ([*J, "--job.width"], 2, "J005 --job.width needs a value"),
    ([*J, "--job.flag", "maybe"], 2, "J005 expected bool"),
    (of("needs"), 2, "J005 --job.depth is missing"),
    (["help", "P999"], 2, "U003"),
    (["help", "trian"], 2, "U003 did you mean  train ?"),
    # the job file
    (["train", "nowhere.py"], 2, "J001 the job file nowhere.py does not exist"),
    (["train", "wavs.py"], 2, "J001 waves.py"),
    (["train", "notes.txt"], 2, "J001 does not end in .py"),
    (["train", "."], 2, "J001"),
    (["train", "broken.py"], 2, "J003 SyntaxError broken.py:2"),
    (["train", "imports.py"], 2, "J003 ModuleNotFoundError imports.py:1"),
    (["train", f"{JOBS}:jop"], 2, "J002 did you mean  job ?"),
    (["train", "waves.py"], 2, "J002 has no function `job`"),
    (of("not_a_job"), 2, "J003 returned dict, not a plait.Job"),
    (of("raises"), 2, "J003 KeyError 'a key of mine' in raises"),
    (of("exits"), 2, "J003 SystemExit"),
    (of("model_instance"), 2, "J004 Job(model= a function that makes one: lambda"),
    (of("optimizer_instance"), 2, "J004 Job(optimizer= lambda parameters"),
    (of("schedule_class"), 2, "J004 Job(schedule= it is a class"),
    (of("schedule_of_two"), 2, "J004 Job.schedule(0) raised TypeError in"),
    (of("schedule_of_none"), 2, "J004 Job.schedule(0) raised TypeError"),
    (of("loss_class"), 2, "J004 Job(loss= it is a class"),
    (of("batch_of_zero"), 2, "J004 Job(batch=0) is not a whole number"),
    (of("batch_of_float"), 2, "J004 Job(batch=8.0) is not a whole number"),
    (of("steps_negative"), 2, "J004 Job(steps=-1)"),
    (of("clip_of_zero"), 2, "J004 Job(clip=0.0)"),
    (of("unknown_field"), 2, "J003 unexpected keyword argument 'epochs'"),
    (of("model_returns_class"), 2, "J006"),
    (of("optimizer_is_none"), 2, "J006"),
    (of("optimizer_of_names"), 1, "C005 too many values to unpack jobs_wrong.py:"),
    (of("data_batches"), 2, "J007"),
    (of("data_dicts"), 2, "J007 input_ids"),
    (of("data_triples"), 2, "J007"),
    (of("data_empty"), 2, "J007 the data is empty"),
    (of("data_number"), 2, "J007"),
    (of("data_ragged"), 2, "J007"),
    (of("evaluate_empty"), 2, "J007"),
    (of("loss_of_vector"), 2, "J010"),
    (of("loss_of_float"), 2, "J010"),
    (of("loss_of_one"), 1, "C005 TypeError"),
    (of("wrong_features"), 1, "C005 shapes cannot be multiplied"),
    (of("units_unknown", "--plan", "fsdp=2"), 2, "J015"),
    # the plan
    ([*J, "--plan", "ddp=2"], 2, "T001 did you mean  dp ?"),
    ([*J, "--plan", "grad_accum=4"], 2, "T001 did you mean  microbatches ?"),
    ([*J, "--plan", "gradient_checkpointing=true"], 2, "T001 did you mean  activation_checkpointing ?"),
    ([*J, "--plan", "dtype=bf16"], 2, "T001 did you mean  precision ?"),
    ([*J, "--plan", "zero_stag=2"], 2, "T001 did you mean  zero_stage ?"),
    ([*J, "--plan", "tensor_parallel=2"], 2, "T001 did you mean  tp ?"),
    ([*J, "--plan", "precision=bfloat16"], 2, "T002 did you mean  bf16 ?"),
    ([*J, "--plan", "dp=two"], 2, "T002 expected a whole number"),
    ([*J, "--plan", "dp=0"], 2, "T002"),
    ([*J, "--plan", "dp=2 dp=4"], 2, "T002 is given twice"),
    ([*J, "--plan", "dp=2 fast"], 2, "T002 is not key=value"),
    ([*J, "--plan", "dp=* tp=*"], 2, "T002 only one axis"),
    ([*J, "--plan", "dp=2", "--nproc", "3"], 2, "P001 --nproc 2"),
    ([*J, "--plan", "dp=16"], 2, "P012 8"),
    ([*J, "--plan", "dp=2 microbatches=9"], 2, "P014 8 / 2"),
    ([*J, "--plan", "zero_stage=2"], 2, "P030 the plan has no fsdp"),
    ([*J, "--plan", "schedule=gpipe"], 2, "P030 the plan has no pp"),
    ([*J, "--plan", "pp=2"], 2, "P023"),
    ([*J, "--plan", "cp=2"], 2, "P040"),
    ([*J, "--plan", "ep=2"], 2, "P051"),
    ([*J, "--plan", "processes=one fsdp=2"], 2, "P019"),
    ([*J, "--plan", "processes=one tp=2"], 2, "P033"),
    ([*J, "--plan", "compile=true activation_checkpointing=selective"], 2, "P035"),
    (of("adafactor", "--plan", "fsdp=2 offload=optimizer"), 2, "P022"),
    (of("adafactor", "--plan", "tp=2 offload=optimizer"), 2, "P022"),
    ([*J, "--plan", "nowhere.toml"], 2, "T003 the plan file nowhere.toml cannot be read"),
    ([*J, "--plan", "broken.toml"], 2, "T003 is not TOML"),
    ([*J, "--plan", "."], 2, "T003"),
    # devices, runs, weights
    ([*J, "--device", "cuda"], 2, "H001"),
    ([*J, "--resume"], 2, "K001"),
    ([*J, "--weights", "nowhere"], 2, "K007"),
    ([*J, "--weights", "notes.txt"], 2, "K007"),
    ([*J, "--runs", "notes.txt"], 2, "R002"),
    # the other commands
    (["verify", f"{JOBS}:job", "--steps", "2"], 2, "U002 at least 3"),
    (["verify", f"{JOBS}:job", "--plan", "dp=x"], 2, "T002"),
    (["sketch", "nowhere.py"], 2, "J001"),
    (["sketch", f"{JOBS}:job", "--batch", "0"], 2, "U002 --batch 0"),
    (["sketch", f"{JOBS}:job", "--plan", "pd=2"], 2, "T001 did you mean"),
    (["plan", f"{JOBS}:job", "--machine", "h100x"], 2, "M010"),
    (["plan", f"{JOBS}:job", "--machine", "broken.toml"], 2, "M012"),
    (["plan", f"{JOBS}:job", "--machine", "h100x8", "--objective", "best"], 2, "U001 invalid choice"),
    (["plan", f"{JOBS}:job", "--machine", "h100x8", "--memory", "80"], 2, "U002 80"),
    (["plan", f"{JOBS}:job", "--machine", "h100x8", "--set", "pd=2"], 2, "T001 did you mean"),
    (["plan", f"{JOBS}:job", "--machine", "h100x8", "--deadline", "soon", "--objective", "min-devices"], 2, "U002 soon"),
    (["plan", f"{JOBS}:job", "--machine", "h100x8", "--gpus", "0"], 2, "U002 0"),
    (["bench", "speed"], 2, "U001 invalid choice"),
    (["bench", "data"], 2, "U001 needs a job"),
    (["report", "nowhere"], 2, "R003"),
    (["report", "nowhere", "--timeline"], 2, "R003"),
    (["checkpoint", "lst", "nowhere"], 2, "U001 invalid choice"),
    (["checkpoint", "list", "nowhere"], 2, "K001"),
    (["checkpoint", "export", "nowhere", "--output", "out"], 2, "K001"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working folder of the commands: a job under another name, files of other kinds, a broken file of each kind."""
    place = tmp_path_factory.mktemp("wrong")
    (place / "waves.py").write_text("import plait\ndef train(): pass\n")
    (place / "broken.py").write_text("import plait\ndef job(:\n")
    (place / "imports.py").write_text("import nothing_of_that_name\n")
    (place / "notes.txt").write_text("no job\n")
    (place / "broken.toml").write_text("[mesh\ndp = 2\n")
    return place


@pytest.mark.parametrize(
    "argv, code, words", sampled(5, WRONG), ids=lambda v: "-".join(v)[-60:] if isinstance(v, list) else None
)
def test_a_wrong_input_is_answered(argv: list[str], code: int, words: str, folder: Path) -> None:
    got = answer(argv, folder)
    first, _, rest = words.partition(" ")
    assert got.code == code, got.output
    assert f"error[{first}]" in got.output, got.output
    assert re.sub(r"\s+", " ", rest) in re.sub(r"\s+", " ", got.output) or all(w in got.output for w in rest.split()), (
        got.output
    )
    assert "Traceback" not in got.output and 'File "' not in got.output, got.output
    assert (
        re.search(r"^  (why|where|fix) ", got.output, re.MULTILINE)
        or "did you mean" in got.output
        or "expected" in got.output
    ), got.output
    assert got.seconds <= SECONDS, f"{got.seconds:.1f} s of processor time"


def test_there_are_many() -> None:
    assert len(WRONG) >= 100 and len({tuple(argv) for argv, _, _ in WRONG}) == len(WRONG)
