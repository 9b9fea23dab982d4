"""Which processes another launcher started: one of several is never alone without a word."""

import pytest

from plait.config.errors import PlaitError
from plait.launch import started_by

SEVERAL = {
    "srun": {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "8"},
    "srun, as far as it is known": {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
    "an old srun": {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
    "mpirun": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
    "mpiexec": {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"},
    "TrainJob": {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "auto"},
    "SkyPilot": {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "2"},
    "dstack": {"DSTACK_NODE_RANK": "0", "DSTACK_NODES_NUM": "3"},
}  # fmt: skip
ALONE = {
    "a shell": {},
    "salloc": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"},
    "salloc with a step": {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NAME": "interactive", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
    "the script of a batch job": {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"},
    "srun -n 1 in a large allocation": {
        "SLURM_STEP_ID": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8",
    },
    "mpirun -n 1": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    "one pod": {"PET_NNODES": "1", "PET_NODE_RANK": "0"},
    "torchrun inside srun": SEVERAL["srun"] | {"RANK": "0"},
}  # fmt: skip


@pytest.mark.parametrize("by", SEVERAL)
def test_one_of_several_is_refused(by: str) -> None:
    with pytest.raises(PlaitError, match="RANK is not set: each would train alone") as caught:
        started_by.check(SEVERAL[by])
    assert caught.value.codes == ["L002"] and caught.value.exit_code == 2
    fix = "\n".join(caught.value.problems[0].fix)
    assert "torchrun" in fix and "MASTER_ADDR" in fix and "unset" in fix


@pytest.mark.parametrize("by", ALONE)
def test_one_that_is_meant_to_be_alone_is_not(by: str) -> None:
    started_by.check(ALONE[by])


WHOLE = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("more, local", (
    ({"LOCAL_RANK": "1"}, 1), ({"SLURM_LOCALID": "0"}, 0), ({"OMPI_COMM_WORLD_LOCAL_RANK": "3"}, 3), ({}, None),
    ({"LOCAL_RANK": "1", "SLURM_LOCALID": "0"}, 1),
))  # fmt: skip
def test_the_place_on_the_machine(more: dict[str, str], local: int | None) -> None:
    assert started_by.joined_as(WHOLE | more) == (1, 4, local)


@pytest.mark.parametrize("wrong, words", (
    ({"RANK": "one"}, "RANK=one"), ({"RANK": "4"}, "ranks count from 0"), ({"WORLD_SIZE": ""}, "WORLD_SIZE="),
    ({"MASTER_PORT": "http"}, "MASTER_PORT=http"), ({"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1"),
))  # fmt: skip
def test_numbers_that_do_not_go_together(wrong: dict[str, str], words: str) -> None:
    with pytest.raises(PlaitError, match=words) as caught:
        started_by.joined_as(WHOLE | wrong)
    assert caught.value.codes == ["L001"]


def test_a_launcher_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says where rank 0 listens is joined by its own names."""
    toy = started_by.Launcher("toyrun", "TOY_RANK", ("TOY_RANKS",), joins=True)
    monkeypatch.setattr(started_by, "LAUNCHERS", (*started_by.LAUNCHERS, toy))
    said = {"TOY_RANK": "2", "TOY_RANKS": "3", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    started_by.check(said)
    assert started_by.joined(said) is toy and started_by.joined_as(said) == (2, 3, None)
    with pytest.raises(PlaitError, match="TOY_RANK is set, so plait joins a launcher, but MASTER_ADDR is not"):
        started_by.joined_as({k: v for k, v in said.items() if k != "MASTER_ADDR"})
