"""Runs with compressed sums resume from a checkpoint bit for bit. It contains the residuals of every replica, and the factors."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs_compressed
import pytest
import torch
from rarely import every
from saved import manifest, whole_and_killed

from plait.checkpoint import training_state
from plait.checkpoint.manifest import MANIFEST_NAME, seal_json, unseal_json
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.tensors.rows import Part

SAVED, LAST = 4, 8


def train(
    folder: Path, text: str, *, resume: bool = False, allow: bool = False, last: int = LAST
) -> list[dict[str, Any]]:
    """Each rank's weights after the last step, and the differences to the checkpoint's job. Saves a checkpoint on the way."""

    def rank(place: Place) -> dict[str, Any]:
        job = replace(jobs_compressed.job("courses"), steps=100, seed=3)
        engine = Engine(job, text, place=place, directory=folder, device="cpu")
        if resume:
            engine.resume(allow_changes=allow)
        for batch in engine.batches():
            engine.step(batch)
            if engine.position.step == SAVED and not resume:
                engine.save()
            if engine.position.step == last:
                break
        weights = {name: p.tolist() for name, p in engine.rank_model.params.items()}
        return {"changed": engine.checkpoints.job_changes, "weights": weights}

    return fork.run_ranks(rank, Plan.parse(text).world)


PLANS = ("dp=2 grad_compression=int8", "dp=3 grad_compression=powersgd compression_rank=1", "dp=2 grad_compression=bf16 microbatches=2",
    "pp=2 dp=2 grad_compression=int8")  # fmt: skip


@pytest.mark.parametrize("text", every(2, (PLANS[1], PLANS[0], PLANS[3], PLANS[2])))
def test_resumed_is_uninterrupted(tmp_path: Path, text: str) -> None:
    assert train(tmp_path, text) == train(tmp_path, text, resume=True)
    names = manifest(tmp_path / f"step-{SAVED:06d}").tensors
    copies = Plan.parse(text).dp
    assert {n.split("/")[2] for n in names if n.startswith("compress/residual/")} == set(map(str, range(copies)))
    assert any(n.startswith("compress/factor/") for n in names) == ("powersgd" in text)


def unsaved(kind: str) -> Any:
    """Compression state is not saved in checkpoints, or only that of one kind."""
    real = training_state._iter_compressor_parts
    return lambda *given: (row for row in real(*given) if not row[1].startswith(kind))


def of_copy_0(training: Any, model: Any) -> Iterator[tuple[str, str, Part]]:
    """All replicas' residuals are saved as if they were equal."""
    for name, key, part in REAL(training, model):
        yield name.replace("/residual/1/", "/residual/0/"), key, part


REAL = training_state._iter_compressor_parts
LOST = {"residuals are not saved": (PLANS[0], unsaved("residual")), "factors are not saved": (PLANS[1], unsaved("factor")),
        "one copy's residual is saved for all": (PLANS[0], of_copy_0)}  # fmt: skip


@pytest.mark.parametrize("bug", LOST)
def test_what_is_not_saved_is_missed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bug: str) -> None:
    text, patch = LOST[bug]
    monkeypatch.setattr(training_state, "_iter_compressor_parts", patch)
    assert train(tmp_path, text) != train(tmp_path, text, resume=True)


@pytest.mark.parametrize("text", ("dp=3 grad_compression=int8", "dp=2 grad_compression=bf16", "dp=2"))
def test_what_has_no_residuals_of_these_is_refused_unless_allowed(tmp_path: Path, text: str) -> None:
    train(tmp_path, "dp=2 grad_compression=int8", last=SAVED)
    with pytest.raises(PlaitError, match="K010") as error:
        train(tmp_path, text, resume=True)
    assert "int8 between 2 copies →" in str(error.value) and "--allow-changes" in str(error.value)
    (told,) = train(tmp_path, text, resume=True, allow=True)[0]["changed"]
    assert told.startswith("compress: int8 between 2 copies →") and told.endswith("without the residuals")


def test_residuals_begin_where_compression_does(tmp_path: Path) -> None:
    train(tmp_path, "dp=2", last=SAVED)
    assert train(tmp_path, "dp=2 grad_compression=int8", resume=True)[0]["changed"] == [
        "compress: none → int8 between 2 copies"
    ]


@pytest.mark.parametrize("wrong", ("missing", "shape"))
def test_a_checkpoint_without_its_residuals_is_damaged(tmp_path: Path, wrong: str) -> None:
    train(tmp_path, "dp=2 grad_compression=int8", last=SAVED)
    path = tmp_path / f"step-{SAVED:06d}" / MANIFEST_NAME
    content = unseal_json(path.read_bytes())
    name = "compress/residual/1/first.weight"
    entry = content["tensors"].pop(name)
    if wrong == "shape":
        (piece,) = entry["pieces"]
        content["tensors"][name] = {**entry, "shape": [6, 8], "pieces": [{**piece, "size": [6, 8]}]}
    path.write_bytes(seal_json(content))
    with pytest.raises(PlaitError, match="K002"):
        train(tmp_path, "dp=2 grad_compression=int8", resume=True)


def test_killed_and_resumed(tmp_path: Path) -> None:
    """The command itself, killed between two checkpoints."""
    ends = whole_and_killed(tmp_path, "dp=2 grad_compression=int8", "not exact: gradients are summed as int8 between 2 copies")
    assert ends[0].keys() == ends[1].keys() and all(torch.equal(t, ends[1][n]) for n, t in ends[0].items())
    assert any(n.startswith("compress/residual/1/") for n in ends[0])
