"""Any words of a user are quoted for a scheduler such that the scheduler returns them unchanged."""

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from submitted import Programs, asked, expanded, sbatch

from plait.config.errors import PlaitError
from plait.integrations.submit.jobset import dump_yaml
from plait.integrations.submit.submission import Submission, join_shell_words, load_scheduler

WORST = (
    "it's", 'say "hi"', "$(touch /tmp/plait-was-here)", "`id`", "a b", " ", "a\nb", "a\n", "\n\n", "; rm -rf x", "-x", "--", "é 漢 🙂",
    "\\", "\\n", "a\\", "#x", "a #b", "a: b", "- a", "{a}", "[a", "%j", "&x", "*x", "!x", "|", ">", "@", "~", "null", "yes", "1e3", "0x1",
    "1:30", "2026-01-01", "$HOME", "${HOME}", "$(PLAIT_SECRET)", "$$", "$", "a\tb", "\r", "\x85", "\u2028", "\ufeff", "\x7f", "=", "",
)  # fmt: skip
letters = st.characters(blacklist_categories=("Cs",), blacklist_characters="\0")
TEXTS = st.one_of(
    st.sampled_from(WORST), st.text(letters, max_size=12), st.text(st.sampled_from("'\"$()`\\;& \n#-ab"), max_size=8)
)
NAMED = TEXTS.filter(bool)
USERS = st.builds(
    lambda job, runs, value, folder: asked(
        job=job, runs=runs, words=(f"--job.x={value}", f"--weights={folder}"), folder=folder, image="i"
    ),
    NAMED, NAMED, TEXTS, NAMED,
)  # fmt: skip
many = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    made = Programs(tmp_path_factory.mktemp("programs"), "plait", "srun", "ssh", "ray", "scontrol")
    made.add(
        "cat", '#!/bin/bash\nkill -KILL "$PPID"\n'
    )  # waiting for the end of ssh's channel is not tested here
    return made


def without_change_of_folder(one: Submission) -> Submission:
    """Replaces the test's folder by a fixed one."""
    return Submission(**vars(one) | {"folder": "/"})


def path(one: Submission) -> str:
    return f"./{one.job}" if one.job.startswith("-") else one.job


@many
@given(st.recursive(st.one_of(TEXTS, st.integers(), st.booleans(), st.none()), lambda inner: st.one_of(
    st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)), max_leaves=8))  # fmt: skip
def test_yaml_is_read_as_it_was_meant(value: object) -> None:
    document = {"a": value, "run": "one\ntwo\n"}
    assert yaml.safe_load(dump_yaml(document)) == document


@many
@given(st.lists(TEXTS, min_size=1, max_size=4))
def test_blocks_are_read_as_they_were_meant(lines: list[str]) -> None:
    document = {"a": {"b": ["\n".join(lines), "\n".join([*lines, ""])]}}
    assert yaml.safe_load(dump_yaml(document)) == document


@many
@given(USERS)
def test_slurm(programs: Programs, one: Submission) -> None:
    script = load_scheduler("slurm").write(without_change_of_folder(one))
    ((program, *words),) = programs.run(script, SLURM_JOB_ID="7", SLURM_CPUS_ON_NODE="3")
    plait = words[words.index("plait") :]
    assert program == "srun" and "--cpus-per-task=3" in words and "--nodes=2" in words
    assert plait[:5] == ["plait", "train", path(one), "--plan", "dp=2 tp=2"]
    assert plait[5:] == [*one.words, "--resume=auto", f"--runs={one.runs.rstrip('/')}/job-7", "--nnodes=2"]


@many
@given(NAMED)
def test_options_of_sbatch(value: str) -> None:
    given_ = asked(folder=value, options=(("account", value), ("gres", "gpu:2")))
    if not value.isprintable():
        with pytest.raises(PlaitError, match="S002"):
            load_scheduler("slurm").write(given_)
        return
    options = sbatch(load_scheduler("slurm").write(given_))
    assert options["chdir"] == options["account"] == value
    assert options["nodes"] == "2" and "gpus-per-node" not in options and options["output"] == "job-%j.out"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("jobset", "trainjob"))
@pytest.mark.parametrize("setup", ((), ("true",)))
@many
@given(one=USERS)
def test_pods(programs: Programs, kind: str, setup: tuple[str, ...], one: Submission) -> None:
    one = Submission(**vars(one) | {"setup": setup, "volumes": ((one.runs, one.job),)})
    document = yaml.safe_load(load_scheduler(kind).write(one))
    spec = document["spec"]
    container = spec["trainer"] if kind == "trainjob" else None
    if container is None:
        pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["workingDir"] == one.folder and container["volumeMounts"][1]["mountPath"] == one.job
        assert pod["volumes"][1]["persistentVolumeClaim"]["claimName"] == one.runs
    words = [expanded(word, {"PLAIT_SECRET": "x" * 40, "HOME": "/root"}) for word in container["command"]]
    if setup or kind == "trainjob":
        assert words[:2] == ["/bin/sh", "-c"] and words[3] == "sh"
        if kind == "trainjob":
            assert words[4] == one.folder
            words[4] = "/"
        ((_, *plait),) = programs.run(join_shell_words(words))
    else:
        _, *plait = words
    assert plait[:4] == ["train", path(one), "--plan", "dp=2 tp=2"]
    assert plait[4:8] == [*one.words, f"--runs={one.runs.rstrip('/')}/job", "--resume=auto"]


@pytest.mark.slow
@many
@given(USERS)
def test_skypilot(programs: Programs, one: Submission) -> None:
    document = yaml.safe_load(load_scheduler("skypilot").write(Submission(**vars(one) | {"gpu": "H100"})))
    assert document["workdir"] == one.folder
    ((_, *words),) = programs.run(document["run"])
    assert words[:4] == ["train", path(one), "--plan", "dp=2 tp=2"]
    assert words[4:] == [*one.words, f"--runs={one.runs.rstrip('/')}/job", "--resume=auto", "--nnodes=2"]


@many
@given(USERS)
def test_ray(programs: Programs, one: Submission) -> None:
    ((_, *words),) = programs.run(load_scheduler("ray").write(one))
    at = words.index("--")
    assert words[:at] == ["job", "submit", f"--working-dir={one.folder}"]
    assert words[at + 1 : at + 7] == ["python", "-m", "plait.ray", path(one), "--plan", "dp=2 tp=2"]
    assert words[at + 7 :] == [*one.words, f"--runs={one.runs.rstrip('/')}/job", "--resume=auto"]


@pytest.mark.slow
@settings(many, max_examples=15)  # each example runs bash several times
@given(USERS)
def test_ssh(programs: Programs, one: Submission) -> None:
    """Quoting for ssh first, then for the shell of the host."""
    there = Submission(
        **vars(without_change_of_folder(one)) | {"hosts": ("me@a", "b"), "options": (("Port", one.job),)}
    )
    calls = sorted(programs.run(load_scheduler("ssh").write(there)), key=lambda words: words[-2] != "me@a")
    assert [words[:-1] for words in calls] == [["ssh", "-o", f"Port={one.job}", "--", host] for host in ("me@a", "b")]
    for k, call in enumerate(calls):
        ((_, *words),) = programs.run(f"PLAIT_SECRET= ; printf 'x\\n' | {{ {call[-1]}\n}}", "sh")
        assert words[:4] == ["train", path(one), "--plan", "dp=2 tp=2"]
        rest = [
            f"--runs={one.runs.rstrip('/')}/job",
            "--resume=auto",
            "--nnodes=2",
            f"--node-rank={k}",
            "--master=a:29500",
        ]
        assert words[4:] == [*one.words, *rest]


def test_nothing_of_it_was_run() -> None:
    assert not Path("/tmp/plait-was-here").exists()
