"""Environments of launchers, recorded or written from their sources, and plait's interpretation of each."""

import os
import re
from dataclasses import replace

import pytest
import training

from plait.cli.main import parse_command_line
from plait.cli.plan_and_job import load_plan_and_job
from plait.config.command_options import CheckOptions
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.launch import find_launcher as finder
from plait.launch.find_launcher import LAUNCHERS, find_membership
from plait.launch.launchers import Launcher, Membership, describe_unused_tasks, parse_first_host

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2",
    "ROLE_NAME": "default", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[08-09]",
    "SLURM_GTIDS": "4,5,6,7", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}  # fmt: skip
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_NODE_RANK": "0", "OMPI_MCA_orte_num_nodes": "2", "OMPI_MCA_ess_base_jobid": "3055681537",
    "OMPI_MCA_orte_hnp_uri": "3055681536.0;tcp://10.1.0.4:36457",
}  # fmt: skip
PRRTE = {
    "PRTE_LAUNCHED": "1", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "prterun-head-4711@1",
    "PMIX_SERVER_URI41": "prterun-head-4711@0.0;tcp4://10.1.0.9:45761",
}  # fmt: skip
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "6", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
IN_SLURM = {
    "SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "interactive", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_NTASKS": "2",
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_GTIDS": "1",
    "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}  # fmt: skip
"""The environment of mpirun's ranks if `srun` started its helpers on the nodes of an allocation (recorded, Slurm 22.05)."""
TRAIN_JOB = {
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400", "JOB_COMPLETION_INDEX": "1", "KUBERNETES_SERVICE_HOST": "10.96.0.1",
}  # fmt: skip
PYTORCH_JOB = {
    "RANK": "2",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "NPROC_PER_NODE": "8",
}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.3\n10.0.0.4",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_TASK_ID": "sky-2026-11-23-job_1",
}  # fmt: skip
DSTACK = {
    "DSTACK_NODE_RANK": "0", "DSTACK_NODES_NUM": "3", "DSTACK_GPUS_PER_NODE": "2", "DSTACK_GPUS_NUM": "6",
    "DSTACK_MASTER_NODE_IP": "10.0.0.5",
}  # fmt: skip
BY_HAND = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}

FOUND = {
    "torchrun": (TORCHRUN, ("torchrun", "ranks", 3, 4, 1, 2, 2, "node0", 29500)),
    "torchrun inside srun": (SLURM | TORCHRUN, ("torchrun", "ranks", 3, 4, 1, 2, 2, "node0", 29500)),
    "torchrun in a TrainJob": (TRAIN_JOB | TORCHRUN, ("torchrun", "ranks", 3, 4, 1, 2, 2, "node0", 29500)),
    "srun": (SLURM, ("srun", "ranks", 5, 8, 1, 4, 2, "n08", None)),
    "a step smaller than its allocation": (
        SLURM | {"SLURM_STEP_NUM_TASKS": "6", "SLURM_GTIDS": "3,4,5"}, ("srun", "ranks", 5, 6, 1, 3, 2, "n08", None),
    ),
    "srun in its batch script's variables": (BATCH | SLURM, ("srun", "ranks", 5, 8, 1, 4, 2, "n08", None)),
    "mpirun, Open MPI 4": (OPEN_MPI_4, ("mpirun (Open MPI)", "ranks", 1, 2, 0, 1, 2, "10.1.0.4", None)),
    "mpirun, Open MPI 5": (PRRTE, ("mpirun (Open MPI)", "ranks", 1, 4, 1, 2, None, "10.1.0.9", None)),
    "mpirun whose daemon srun started": (
        OPEN_MPI_4 | IN_SLURM | {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"},
        ("mpirun (Open MPI)", "ranks", 3, 4, 0, 1, 2, "n1", None),
    ),
    "mpirun, Open MPI 5, that says where its helper is": (
        PRRTE | {"PMIX_SERVER_URI41": "prterun-head-4711@0.1;tcp4://127.0.0.1:48325", "MASTER_ADDR": "head"},
        ("mpirun (Open MPI)", "ranks", 1, 4, 1, 2, None, "head", None),
    ),
    "mpiexec on one machine": (
        HYDRA, ("mpiexec (Hydra: MPICH, Intel MPI)", "ranks", 1, 2, 1, 2, None, "127.0.0.1", None),
    ),
    "mpiexec on two": (
        HYDRA | {"MPI_LOCALNRANKS": "1", "MASTER_ADDR": "node0"},
        ("mpiexec (Hydra: MPICH, Intel MPI)", "ranks", 1, 2, 1, 1, None, "node0", None),
    ),
    "mpiexec whose proxy srun started": (
        IN_SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "5", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
        ("mpiexec (Hydra: MPICH, Intel MPI)", "ranks", 3, 4, 0, 1, None, "n1", None),
    ),
    "srun --mpi=pmi2": (SLURM | {"PMI_RANK": "5", "PMI_SIZE": "8"}, ("srun", "ranks", 5, 8, 1, 4, 2, "n08", None)),
    "MVAPICH": (
        {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_SIZE": "2"},
        ("mpiexec (MVAPICH)", "ranks", 0, 2, None, 2, None, "127.0.0.1", None),
    ),
    "PALS": (
        {"PALS_RANKID": "3", "PMI_SIZE": "4", "PMI_RANK": "3", "PALS_LOCAL_RANKID": "1", "MASTER_ADDR": "x1000"},
        ("mpiexec (PALS)", "ranks", 3, 4, 1, None, None, "x1000", None),
    ),
    "jsrun": (
        {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "4", "LSB_MCPU_HOSTS": "batch1 1 a01 42 a02 42"},
        ("jsrun (LSF)", "ranks", 1, 4, None, None, None, "a01", None),
    ),
    "flux run": (
        {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_NNODES": "2", "MASTER_ADDR": "f0"},
        ("flux run", "ranks", 1, 4, 1, None, 2, "f0", None),
    ),
    "a TrainJob": (TRAIN_JOB, ("a Kubeflow TrainJob", "nodes", 1, 2, None, 4, 2, "job-node-0-0.job", 29400)),
    "a TrainJob, auto": (
        TRAIN_JOB | {"PET_NPROC_PER_NODE": "auto"},
        ("a Kubeflow TrainJob", "nodes", 1, 2, None, None, 2, "job-node-0-0.job", 29400),
    ),
    "a PyTorchJob": (PYTORCH_JOB, ("a Kubeflow PyTorchJob", "nodes", 2, 3, None, 8, 3, "job-master-0", 23456)),
    "a PyTorchJob that counts processes": (
        PYTORCH_JOB | {"WORLD_SIZE": "24", "PET_NNODES": "3", "PET_NPROC_PER_NODE": "8"},
        ("a Kubeflow PyTorchJob", "nodes", 2, 3, None, 8, 3, "job-master-0", 23456),
    ),
    "a JobSet": (
        {"JOB_COMPLETION_INDEX": "1", "PLAIT_NNODES": "2", "PLAIT_MASTER": "set-w-0-0.set:29500"},
        ("an indexed Job or JobSet", "nodes", 1, 2, None, None, 2, "set-w-0-0.set", 29500),
    ),
    "SkyPilot": (SKYPILOT, ("SkyPilot", "nodes", 1, 2, None, 8, 2, "10.0.0.3", None)),
    "dstack": (DSTACK, ("dstack", "nodes", 0, 3, None, 2, 3, "10.0.0.5", None)),
    "Lepton": (
        {"LEPTON_JOB_WORKER_INDEX": "1", "LEPTON_JOB_TOTAL_WORKERS": "2"},
        ("DGX Cloud Lepton", "nodes", 1, 2, None, None, 2, None, None),
    ),
    "by hand": (BY_HAND | {"LOCAL_RANK": "1"}, ("RANK", "ranks", 1, 4, 1, None, None, "host", 29500)),
    "by hand, of which Slurm knows the machine": (
        SLURM | {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "n08", "MASTER_PORT": "29500"},
        ("RANK", "ranks", 5, 8, 1, None, None, "n08", 29500),
    ),
    "ranks that a program of SkyPilot's started": (
        SKYPILOT | {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.3", "MASTER_PORT": "1234"},
        ("RANK", "ranks", 9, 16, 1, None, None, "10.0.0.3", 1234),
    ),
    "flags": (
        {"PLAIT_NNODES": "2", "PLAIT_NODE_RANK": "1", "PLAIT_MASTER": "10.0.0.1:4000"},
        ("--nnodes", "nodes", 1, 2, None, None, 2, "10.0.0.1", 4000),
    ),
    "flags, one task of srun on each machine": (
        SLURM | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_GTIDS": "1", "PLAIT_NNODES": "2"},
        ("srun", "nodes", 1, 2, None, None, 2, "n08", None),
    ),
    "an address for mpiexec": (
        HYDRA | {"MPI_LOCALNRANKS": "1", "PLAIT_MASTER": "[fe80::1]:4000"},
        ("mpiexec (Hydra: MPICH, Intel MPI)", "ranks", 1, 2, 1, 1, None, "fe80::1", 4000),
    ),
}  # fmt: skip


def words(found: Membership | None) -> tuple[object, ...] | None:
    if found is None:
        return None
    place = (found.local_rank, found.local_count, found.nodes)
    return (found.launcher, found.member_kind, found.index, found.count, *place, found.master, found.port)


@pytest.mark.parametrize("case", FOUND)
def test_what_is_found(case: str) -> None:
    environment, expected = FOUND[case]
    found = find_membership(environment)
    assert words(found) == expected
    assert found is not None and all(name in environment or name.startswith("--") for name in found.variables)
    assert found.launcher in found.describe() and found.variables[0] in found.describe()


ALONE = {
    "a shell": {},
    "salloc": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"},
    "salloc with a step": {
        "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1",
    },
    "the script of a batch job": BATCH,
    "srun -n 1 in a large allocation": SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    "mpirun -n 1": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    "one pod": {"PET_NNODES": "1", "PET_NODE_RANK": "0"},
    "one machine": {"PLAIT_NNODES": "1"},
    "a pod of an indexed Job that is to be alone": {"JOB_COMPLETION_INDEX": "3", "PLAIT_NNODES": "1", "PLAIT_NODE_RANK": "0"},
}  # fmt: skip


@pytest.mark.parametrize("case", ALONE)
def test_one_that_is_meant_to_be_alone_is_not_joined(case: str) -> None:
    assert find_membership(ALONE[case]) is None


WRONG = {
    "no world": ({"RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "L001", "RANK is set, but WORLD_SIZE is not"),
    "no address": ({"RANK": "1", "WORLD_SIZE": "2"}, "L001", "MASTER_ADDR and MASTER_PORT is not"),
    "no number": (BY_HAND | {"RANK": "one"}, "L001", "RANK=one is not a number"),
    "too many": (BY_HAND | {"RANK": "4"}, "L001", "RANK=4 of WORLD_SIZE=4: numbers begin at 0"),
    "no port": (BY_HAND | {"MASTER_PORT": "http"}, "L001", "MASTER_PORT=http"),
    "a negative place": (BY_HAND | {"LOCAL_RANK": "-1"}, "L001", "LOCAL_RANK=-1"),
    "half a TrainJob": ({"PET_NODE_RANK": "1", "PET_NNODES": "two"}, "L001", "PET_NNODES=two is not a number"),
    "a range that is none": (TRAIN_JOB | {"PET_NNODES": "3:2"}, "L001", "PET_NNODES=3:2 is not a number or a range such as 1:2"),
    "a PyTorchJob of two minds": (
        PYTORCH_JOB | {"WORLD_SIZE": "20", "PET_NNODES": "3"}, "L001", "WORLD_SIZE=20, but PET_NNODES=3 times 8",
    ),
    "half of dstack": ({"DSTACK_NODE_RANK": "1"}, "L001", "DSTACK_NODES_NUM is not"),
    "RANK against srun": (
        SLURM | BY_HAND, "L005", "RANK=1, WORLD_SIZE=4, but SLURM_PROCID=5, SLURM_STEP_NUM_TASKS=8",
    ),
    "mpirun against srun": (SLURM | OPEN_MPI_4 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "L005", "SLURM_PROCID=5, .*OMPI_COMM_WORLD_RANK=1"),
    "ranks on another machine than SkyPilot says": (
        SKYPILOT | BY_HAND | {"LOCAL_RANK": "1"}, "L005", "SKYPILOT_NODE_RANK=1",
    ),
    "an indexed Job": ({"JOB_COMPLETION_INDEX": "1"}, "L006", "number 1 of an indexed Job, and the number of pods is unknown"),
    "a rank without a count": ({"PLAIT_NODE_RANK": "1"}, "L006", "--nnodes is missing"),
    "a master without a count": ({"PLAIT_MASTER": "a:1"}, "L006", "--nnodes is missing"),
    "a count alone": ({"PLAIT_NNODES": "2"}, "L006", "--nnodes 2 needs --node-rank and --master too"),
    "a rank too high": ({"PLAIT_NNODES": "2", "PLAIT_NODE_RANK": "2", "PLAIT_MASTER": "a"}, "L006", "--node-rank 2 of --nnodes 2"),
    "no machine": ({"PLAIT_NNODES": "0"}, "L006", "the minimum is 1"),
    "no address of a port": (
        {"PLAIT_NNODES": "2", "PLAIT_NODE_RANK": "1", "PLAIT_MASTER": "a:http"}, "L006", "--master a:http is not an address",
    ),
    "many tasks on two machines": (SLURM | {"PLAIT_NNODES": "2"}, "L006", "--nnodes 2, but srun started 8 processes"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_go_together_is_an_error_with_both_numbers(case: str) -> None:
    environment, code, text = WRONG[case]
    with pytest.raises(PlaitError, match=text) as caught:
        find_membership(environment)
    assert caught.value.codes == [code] and caught.value.problems[0].fix


LEFT_OVER = {
    "RANK, --nproc": (BY_HAND | {"RANK": "0", "WORLD_SIZE": "1"}, ["--nproc", "2"], r"--nproc 2 .*RANK=0, WORLD_SIZE=1.*unset RANK WORLD_SIZE"),
    "RANK, --plan": (BY_HAND | {"RANK": "0", "WORLD_SIZE": "1"}, ["--plan", "dp=2"], 'dp=2" \\(processes: 2\\) .*rank 0 of 1.*--plan "dp=1"'),
    "a larger world": (BY_HAND | {"RANK": "0", "WORLD_SIZE": "8"}, ["--plan", "dp=2", "--nproc", "2"], "--nproc 2 .*WORLD_SIZE=8"),
    "torchrun": (TORCHRUN, ["--nproc", "3"], "--nproc 3 .*rank 3 of 4.*unset RANK WORLD_SIZE LOCAL_RANK"),
    "srun": (SLURM, ["--nproc", "2"], "--nproc 2 .*SLURM_PROCID=5, SLURM_STEP_NUM_TASKS=8.*unset SLURM_PROCID"),
    "mpirun": (OPEN_MPI_4, ["--nproc", "4"], "--nproc 4 .*rank 1 of 2.*unset OMPI_COMM_WORLD_RANK"),
    "mpiexec, a plan": (HYDRA, ["--plan", "fsdp=4"], "fsdp=4.*PMI_RANK=1, PMI_SIZE=2"),
}  # fmt: skip
AGREED = {
    "torchrun's ranks": (TORCHRUN, ["--nproc", "4"], 4),
    "torchrun's ranks of this machine": (TORCHRUN, ["--nproc", "2", "--plan", "dp=4"], 4),
    "srun": (SLURM, ["--plan", "dp=8"], 8),
    "srun, a wildcard": (SLURM, ["--plan", "dp=* tp=2"], 8),
    "mpirun": (PRRTE, ["--plan", "fsdp=4"], 4),
    "srun -n 1 left over": (ALONE["srun -n 1 in a large allocation"], ["--nproc", "2"], 2),
    "mpirun -n 1 left over": (ALONE["mpirun -n 1"], ["--plan", "dp=2", "--nproc", "2"], 2),
    "LOCAL_RANK alone": ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, ["--nproc", "2"], 2),
    "WORLD_SIZE alone": ({"WORLD_SIZE": "4"}, ["--plan", "dp=2"], 2),
    "a machine of several": (PYTORCH_JOB, ["--nproc", "2", "--plan", "dp=*"], 6),
}


def _plan(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], typed: list[str]) -> Plan:
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(finder.find_membership, "__defaults__", (environment,))
    _, options = parse_command_line(["check", "job.py", *typed])
    assert isinstance(options, CheckOptions)
    return load_plan_and_job(replace(options, loaded=training.job()))[0]


@pytest.mark.parametrize("case", LEFT_OVER)
def test_a_command_that_contradicts_the_environment(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment, typed, text = LEFT_OVER[case]
    with pytest.raises(PlaitError) as caught:
        _plan(monkeypatch, dict(environment), typed)
    assert caught.value.codes == ["L005"] and re.search(text, str(caught.value), re.DOTALL), caught.value
    assert not any(line.startswith("--nproc") for line in caught.value.problems[0].fix)


@pytest.mark.parametrize("case", AGREED)
def test_a_command_that_agrees_with_the_environment(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment, typed, count = AGREED[case]
    assert _plan(monkeypatch, dict(environment), typed).world == count


@pytest.mark.parametrize("listed, first", (
    ("n1", "n1"), ("n1,n2", "n1"), ("n[08-11,15],login", "n08"), ("rack[0-1]n[00-03]", "rack0n00"), ("gpu[7,9]-ib", "gpu7-ib"),
))  # fmt: skip
def test_the_first_of_a_list_of_hosts(listed: str, first: str) -> None:
    assert parse_first_host(listed) == first


def test_an_allocation_that_is_not_used_is_told() -> None:
    told = describe_unused_tasks(BATCH | {"SLURM_JOB_NUM_NODES": "2"})
    assert told is not None and "4 tasks on 2 machines" in told and "srun plait train" in told
    assert describe_unused_tasks(ALONE["salloc with a step"]) is not None
    assert (
        describe_unused_tasks({}) is None
        and describe_unused_tasks(SLURM) is None
        and describe_unused_tasks({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"}) is None
    )


def test_a_launcher_is_one_description(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Launcher("toyrun", "TOY_RANK", ("TOY_RANKS",))
    monkeypatch.setattr(finder, "LAUNCHERS", LAUNCHERS | {"toyrun": toy})
    said = {"TOY_RANK": "2", "TOY_RANKS": "3", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    assert words(find_membership(said)) == ("toyrun", "ranks", 2, 3, None, None, None, "host", 29500)


@pytest.mark.parametrize(
    "found", (TRAIN_JOB | {"PET_NNODES": "1:2"}, {"PLAIT_NNODES": "1:2", "PLAIT_NODE_RANK": "1", "PLAIT_MASTER": "a"})
)
def test_a_range_of_machines(found: dict[str, str]) -> None:
    member = find_membership(found)
    assert member is not None and (member.count, member.min_count, member.index) == (2, 1, 1)
