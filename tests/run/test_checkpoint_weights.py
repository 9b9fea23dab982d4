"""Weights in and out of checkpoints: in Hugging Face's format, without code that runs on load or paths outside of the folder."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from launched import TEST_JOB, Command
from safetensors.torch import load_file, save_file

from plait import Engine, Job, PlaitError, Plan
from plait.checkpoint.foreign_weights import INDEX_NAME, _suggest_fix
from plait.cli.main import main
from plait.launch import fork
from run.test_checkpoint_damage import train_and_save


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint of a tied model, and its weights in torch's format."""
    engine = Engine(jobs.ragged(), "dp=1", device="cpu", directory=tmp_path / "checkpoints")
    for batch, _ in zip(engine.batches(), range(2)):
        engine.step(batch)
    engine.save()
    return tmp_path / "checkpoints", {name: t.detach().clone() for name, t in engine.model.state_dict().items()}


def fresh(job: Job | None = None) -> Engine:
    return Engine(job or jobs.ragged(), "dp=1", device="cpu")


def filled(path: Path, job: Job | None = None) -> dict[str, torch.Tensor]:
    engine = fresh(job)
    engine.load_weights(path)
    return dict(engine.model.state_dict())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def refusal(path: Path, job: Job | None = None) -> PlaitError:
    engine = fresh(job)
    before = [p.clone() for p in engine.model.parameters()]
    with pytest.raises(PlaitError) as caught:
        engine.load_weights(path)
    assert all(map(torch.equal, before, engine.model.parameters())), "something was read all the same"
    return caught.value


@pytest.mark.parametrize("limit", ("5GB", "2KB"))
def test_export_is_what_hugging_face_reads(saved: Any, tmp_path: Path, limit: str, capfd: Any) -> None:
    path, weights = saved
    assert main(["checkpoint", "export", str(path), "--output", str(tmp_path / "out"), "--shard", limit]) == 0
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    read: dict[str, torch.Tensor] = {}
    if limit == "5GB":
        assert names == ["model.safetensors"]
        read = load_file(tmp_path / "out/model.safetensors")
    else:
        index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
        assert (
            index["metadata"]["total_size"] == sum(t.nbytes for t in weights.values()) - weights["embed.weight"].nbytes
        )
        for file in sorted(set(index["weight_map"].values())):
            part = load_file(tmp_path / "out" / file)
            assert {n for n, f in index["weight_map"].items() if f == file} == part.keys()
            assert len(part) == 1 or sum(t.nbytes for t in part.values()) <= 2000
            read |= part
        assert len(names) > 3 and names[0] == f"model-00001-of-{len(names) - 1:05d}.safetensors"
    assert "head.weight" not in read and same(read | {"head.weight": read["embed.weight"]}, weights)
    assert same(filled(tmp_path / "out"), weights)
    assert main(["checkpoint", "export", str(path), "--output", str(tmp_path / "out")]) == 2, "never over weights"
    assert "K009" in capfd.readouterr().err


def test_export_in_another_format(saved: Any, tmp_path: Path) -> None:
    path, weights = saved
    to = tmp_path / "half.safetensors"
    assert main(["checkpoint", "export", str(path / "step-000002"), "--output", str(to), "--dtype", "bf16"]) == 0
    assert all(torch.equal(t, weights[n].bfloat16()) for n, t in load_file(to).items())
    assert all(torch.equal(t, weights[n].bfloat16().float()) for n, t in filled(to).items()), (
        "cast to the model's format"
    )


def test_import_of_everything_plait_reads(saved: Any, tmp_path: Path) -> None:
    path, weights = saved
    assert (
        same(filled(path), weights)
        and same(filled(path / "step-000002"), weights)
        and same(filled(path.parent), weights)
    )
    untied = {n: t.clone() for n, t in weights.items() if n != "embed.weight"}
    save_file(untied, tmp_path / "tied.safetensors")
    assert same(filled(tmp_path / "tied.safetensors"), weights), "a tied tensor under its other name"
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "tied.safetensors")
    assert same(filled(tmp_path / "link.safetensors"), weights), "a link the user names is theirs"


@pytest.mark.parametrize("to", ("best.pt", "best.bin", "x/best.onnx", "best.safetensor"))
def test_a_name_of_another_format_is_no_folder(saved: Any, tmp_path: Path, to: str, capfd: Any) -> None:
    assert main(["checkpoint", "export", str(saved[0]), "--output", str(tmp_path / to)]) == 2
    assert (
        "error[U002]" in (said := capfd.readouterr().err) and str((tmp_path / to).with_suffix(".safetensors")) in said
    )
    assert not (tmp_path / to).exists()
    assert main(["checkpoint", "export", str(saved[0]), "--output", f"{tmp_path / to}/"]) == 0, (
        "a folder, since that is said"
    )
    assert "note  head.weight is tied to embed.weight" in capfd.readouterr().out


def test_weights_of_a_model_that_is_wrapped(tmp_path: Path) -> None:
    inner = {n: t.clone() for n, t in fresh(jobs.mlp()).model.state_dict().items()}
    assert "names start with _orig_mod." in _suggest_fix([f"_orig_mod.{n}" for n in inner], list(inner))[0]
    assert "without the prefix module." in _suggest_fix(list(inner), [f"module.{n}" for n in inner])[0]
    save_file({f"module.{n}": t for n, t in inner.items()}, tmp_path / "w.safetensors")
    error = refusal(tmp_path / "w.safetensors", jobs.mlp())
    assert error.codes == ["K008", "K008"] and all("without the prefix module." in p.fix[0] for p in error.problems)


def test_each_rank_reads_its_own_parts(saved: Any, tmp_path: Path) -> None:
    path, weights = saved
    shape = tuple(weights["embed.weight"].shape)

    def rank(place: Any) -> list[Any]:
        engine = Engine(jobs.ragged(), Plan.parse("fsdp=2"), device="cpu", place=place)
        engine.load_weights(path)
        part = engine.rank_model.get_parts()["embed.weight"]
        return [tuple(part.tensor.shape) != shape, torch.equal(part.tensor, part.slice_tensor(weights["embed.weight"]))]

    assert fork.run_ranks(rank, 2, fork.Listener(lambda *_: None)) == [[True, True]] * 2


def test_names_and_shapes_must_fit(tmp_path: Path) -> None:
    weights = {n: t.clone() for n, t in fresh(jobs.mlp()).model.state_dict().items()}
    file = tmp_path / "w.safetensors"
    save_file({n.replace("0.weight", "0.wieght"): t for n, t in weights.items()}, file)
    error = refusal(file, jobs.mlp())
    assert (
        error.codes == ["K008", "K008"] and "lack 0.weight" in str(error) and "did you mean  0.wieght ?" in str(error)
    )
    save_file({**weights, "0.weight": torch.zeros(6, 16)}, file)
    error = refusal(file, jobs.mlp())
    assert error.codes == ["K008"] and "[6, 16] there, [16, 6] in the model" in str(error)
    save_file({**weights, "0.weight": torch.zeros(16, 6, dtype=torch.int32)}, file)
    assert refusal(file, jobs.mlp()).codes == ["K008"]


class Payload:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


@pytest.mark.parametrize(
    "name", ("model.pt", "pytorch_model.bin", "weights.pth", "last.ckpt", "dcp", "model.safetensors")
)
def test_pickles_are_refused_unopened(tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary"
    folder = tmp_path / "foreign"
    folder.mkdir()
    file = folder / (".metadata" if name == "dcp" else name)
    file.write_bytes(pickle.dumps(Payload(canary)))
    if name == "dcp":
        (folder / "__0_0.distcp").write_bytes(b"\0" * 64)
    for path in (folder, file):
        error = refusal(path)
        assert error.codes == ["K002" if name == "model.safetensors" else "K007"] and file.name in str(error)
    assert not canary.exists()
    pickle.loads(file.read_bytes())
    assert canary.exists(), "the payload works"


@pytest.mark.parametrize("to", ("outside", "absolute", "link", "index link", "pickle", "deep", "list", "ghost"))
def test_an_index_cannot_lead_elsewhere(saved: Any, tmp_path: Path, to: str) -> None:
    path, _ = saved
    folder, secret = tmp_path / "hf", tmp_path / "secret.safetensors"
    assert main(["checkpoint", "export", str(path), "--output", str(folder), "--shard", "2KB"]) == 0
    index = json.loads((folder / INDEX_NAME).read_text())
    victim = index["weight_map"]["embed.weight"]
    shutil.copy(folder / victim, secret)
    if to == "link":
        (folder / victim).unlink()
        (folder / victim).symlink_to(secret)
    elif to == "index link":
        (folder / INDEX_NAME).rename(tmp_path / "index.json")
        (folder / INDEX_NAME).symlink_to(tmp_path / "index.json")
    else:
        new = {
            "outside": "../secret.safetensors",
            "absolute": str(secret),
            "pickle": "model.bin",
            "deep": [[]],
            "ghost": "x.safetensors",
        }
        index["weight_map"]["embed.weight"] = new.get(to)
        text = "[" * 3000 if to == "deep" else "[]" if to == "list" else json.dumps(index)
        (folder / INDEX_NAME).write_text(text)
    assert refusal(folder).codes == ["K002"]


def test_the_command_looks_into_checkpoints(tmp_path: Path, capfd: Any) -> None:
    train_and_save(tmp_path / "checkpoints", "dp=2", (1, 2, 3))

    def asked(*words: str) -> tuple[int, Any]:
        code = main(["checkpoint", words[0], str(tmp_path), *words[1:], "--json"])
        return code, json.loads(capfd.readouterr().out)

    code, rows = asked("list")
    assert code == 0 and [(r["step"], r["plan"], r["state"]) for r in rows] == [(s, "dp=2", "good") for s in (3, 2, 1)]
    code, info = asked("info", "--step", "2")
    assert code == 0 and info["step"] == 2 and info["parent"] == "step-000001" and info["elements"] == 6 * 9 + 9 + 9 + 1
    assert asked("verify") == (0, {"ok": True, "checkpoints": asked("verify")[1]["checkpoints"]})
    victim = tmp_path / "checkpoints/step-000003/model-00001.safetensors"
    content = victim.read_bytes()
    victim.write_bytes(content[:-1] + bytes([content[-1] ^ 4]))
    code, found = asked("verify")
    assert code == 1 and [r["good"] for r in found["checkpoints"]] == [False, True, True]
    assert found["good"].endswith("step-000002") and str(victim) in found["checkpoints"][0]["errors"][0]["what"]
    code, found = asked("verify", "--step", "3")
    assert code == 1 and found["good"].endswith("step-000002")
    assert main(["checkpoint", "export", str(tmp_path), "--output", str(tmp_path / "out")]) == 2, "nothing damaged goes out"
    assert main(["checkpoint", "info", str(tmp_path), "--step", "9"]) == 2
    assert main(["checkpoint", "list", str(tmp_path / "nowhere")]) == 2
    assert main(["checkpoint", "export", str(tmp_path), "--output", "x", "--shard", "much"]) == 2
    assert "error[K002]" in (text := capfd.readouterr().err) and "step-000001, step-000002"[:4] in text
    victim.unlink()
    assert asked("list")[1][0]["state"].startswith("damaged: model-00001.safetensors")


@pytest.mark.slow
def test_train_starts_from_weights(saved: Any, tmp_path: Path) -> None:
    first = Command("train", TEST_JOB, "--nproc", "1", "--steps", "6", folder=tmp_path)
    assert first.wait() == 0, first.output
    source = tmp_path / "runs/latest"
    later = Command(
        "train", TEST_JOB, "--nproc", "2", "--steps", "2", "--weights", str(source.resolve()), folder=tmp_path
    )
    assert later.wait() == 0, later.output
    wrong = Command("train", TEST_JOB, "--nproc", "2", "--weights", str(saved[0]), folder=tmp_path)
    assert wrong.wait() == 2 and "error[K008]" in wrong.output, wrong.output
    runs = sorted(p.name for p in (tmp_path / "runs").iterdir())
    nothing = Command("train", TEST_JOB, "--nproc", "2", "--weights", "x.pt", folder=tmp_path)
    assert nothing.wait() == 2 and "error[K007]" in nothing.output
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == runs, "said before a run directory was made"
