"""No damaged checkpoint is ever loaded: each of many mutations is rejected by name, and the previous checkpoint is used."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from saved import read_checkpoint_tensors

from plait import Engine, PlaitError, Plan
from plait.checkpoint.checkpoints import verify_checkpoint
from plait.checkpoint.manifest import MANIFEST_NAME, seal_json, unseal_json
from plait.launch import fork

Mutation = Callable[[Path, random.Random], None]


def train_and_save(folder: Path, plan: str, steps: tuple[int, ...]) -> None:
    def rank(place: Any) -> None:
        engine = Engine(jobs.groups(), Plan.parse(plan), device="cpu", directory=folder, place=place)
        for batch in engine.batches():
            if engine.step(batch).step in steps:
                engine.save(keep=9)
            if engine.position.step == max(steps):
                break

    fork.run_ranks(rank, Plan.parse(plan).world, fork.Listener(lambda *_: None))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1, 2 and 3, written by two ranks."""
    folder = tmp_path_factory.mktemp("good")
    train_and_save(folder, "dp=2", (1, 2, 3))
    return folder


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def a_file(path: Path, draw: random.Random) -> Path:
    return draw.choice(sorted(path.iterdir()))


def shard(path: Path, draw: random.Random) -> Path:
    return draw.choice(sorted(path.glob("*.safetensors")))


def cut(path: Path, draw: random.Random) -> None:
    file = a_file(path, draw)
    os.truncate(file, draw.randrange(file.stat().st_size))


def extend(path: Path, draw: random.Random) -> None:
    with open(a_file(path, draw), "ab") as file:
        file.write(draw.randbytes(draw.randint(1, 64)))


def swap_files(path: Path, draw: random.Random) -> None:
    a, b = draw.sample(sorted(path.iterdir()), 2)
    one, other = a.read_bytes(), b.read_bytes()
    a.write_bytes(other)
    b.write_bytes(one)


def swap_pieces(path: Path, draw: random.Random) -> None:
    """Swaps two byte ranges of a file."""
    file = shard(path, draw)
    content = bytearray(file.read_bytes())
    size = draw.randint(4, 64)
    a, b = sorted(draw.sample(range(len(content) - size), 2))
    if b - a < size or content[a : a + size] == content[b : b + size]:
        return flip(file, draw)
    content[a : a + size], content[b : b + size] = content[b : b + size], content[a : a + size]
    file.write_bytes(content)
    return None


def foreign(path: Path, draw: random.Random) -> None:
    """A file of another step under the same name: same sizes, other values."""
    file = a_file(path, draw)
    file.write_bytes((path.parent / "step-000001" / file.name).read_bytes())


def duplicate(path: Path, draw: random.Random) -> None:
    """The content of one file under the name of another."""
    a, b = draw.sample(sorted(path.glob("*.safetensors")), 2)
    a.write_bytes(b.read_bytes())


def other_kind(path: Path, draw: random.Random) -> None:
    """A link, a folder or nothing in place of a file."""
    file = a_file(path, draw)
    kept = path.parent / f"kept-{file.name}"
    shutil.copy(file, kept)
    file.unlink()
    if draw.random() < 0.3:
        file.mkdir()
    elif draw.random() < 0.5 and file.suffix != ".json":
        file.symlink_to(kept)


def edits(content: dict[str, Any], draw: random.Random) -> list[Callable[[], Any]]:
    """Manifest edits that a forged seal would not reveal."""
    names = [name for name, entry in content["tensors"].items() if entry["pieces"] and entry["shape"]]
    entry = content["tensors"][draw.choice(names)]
    other = content["tensors"][draw.choice(names)]
    piece = draw.choice(entry["pieces"])
    dim = draw.randrange(len(entry["shape"]))
    file = draw.choice(sorted(content["files"]))
    odd = draw.choice([-1, 2**63, 10**30, 1.5, "3", None, True, [], {}])
    deep: Any = []
    for _ in range(draw.choice([50, 900])):
        deep = [deep]

    def rename(new: str) -> None:
        content["files"][new] = content["files"].pop(file)
        for e in content["tensors"].values():
            for p in e["pieces"]:
                p["file"] = new if p["file"] == file else p["file"]

    outside = [
        "../step-000002/model-00000.safetensors",
        "/etc/passwd",
        "a/../b.safetensors",
        "..",
        "",
        "x\0.safetensors",
    ]
    return [
        lambda: entry["shape"].__setitem__(dim, entry["shape"][dim] + draw.choice([-1, 1, 7])),
        lambda: entry["shape"].append(1),
        lambda: entry["shape"].__setitem__(dim, odd),
        lambda: piece["start"].__setitem__(dim, odd),
        lambda: piece["size"].__setitem__(dim, odd),
        lambda: piece["start"].__setitem__(dim, piece["start"][dim] + 1),
        lambda: piece["size"].__setitem__(dim, piece["size"][dim] + draw.choice([-1, 1])),
        lambda: entry["pieces"].append(dict(piece)),
        lambda: entry["pieces"].remove(piece),
        lambda: entry["pieces"].append({**draw.choice(other["pieces"]), "start": piece["start"], "size": piece["size"]}),
        lambda: entry.__setitem__("dtype", draw.choice(["F64", "I32", "F16", "Q4", "", 7, None])),
        lambda: entry.__setitem__("pieces", deep),
        lambda: content.__setitem__("tensors", draw.choice([deep, odd, []])),
        lambda: piece.__setitem__("key", draw.choice(["nothing", odd, "../x"])),
        lambda: piece.__setitem__("file", draw.choice(["nothing.safetensors", odd, MANIFEST_NAME])),
        lambda: piece.__setitem__("sha256", draw.choice(["0" * 64, "", odd, piece["sha256"][:-1]])),
        lambda: rename(draw.choice(outside)),
        lambda: content["files"][file].__setitem__("bytes", draw.choice([odd, 0, 1])),
        lambda: content["files"][file].__setitem__("header", draw.choice([odd, "0" * 64])),
        lambda: content["files"].pop(file),
        lambda: content["position"].__setitem__(draw.choice(["step", "epoch", "start", "samples"]), odd),
        lambda: content["position"].__setitem__("step", draw.choice([0, 2, 4, 10**9])),
        lambda: content.__setitem__("format", draw.choice([1, 3, odd, deep])),
        lambda: content.__setitem__("optimizer", draw.choice([odd, deep])),
        lambda: content["optimizer"]["scalars"].__setitem__(draw.choice(["ghost/step", "0.weight/step"]), deep),
        lambda: content["optimizer"]["groups"][0].__setitem__("params", draw.choice([[], deep, odd, ["ghost"]])),
        lambda: content.__setitem__("scaler", draw.choice([-1, deep, {"value": -2.0, "good_steps": 0}])),
        lambda: content["aliases"].__setitem__("tied", "ghost"),
        lambda: content["tensors"].__setitem__("ghost/x", dict(entry)),
        lambda: content.pop(draw.choice(["tensors", "files", "position", "optimizer", "format", "seed", "plan"])),
    ]  # fmt: skip


def forge(path: Path, draw: random.Random) -> None:
    content = unseal_json((path / MANIFEST_NAME).read_bytes())
    content.pop("digest", None)
    before = json.dumps(content)
    while json.dumps(content) == before:
        draw.choice(edits(content, draw))()
    (path / MANIFEST_NAME).write_bytes(seal_json(content))


MUTATIONS: tuple[Mutation, ...] = (
    lambda path, draw: flip(a_file(path, draw), draw),
    lambda path, draw: flip(path / MANIFEST_NAME, draw),
    lambda path, draw: flip(shard(path, draw), draw),
    cut, extend, swap_files, swap_pieces, foreign, duplicate, other_kind, forge, forge, forge, forge,
)  # fmt: skip


def refused(good: Path, folder: Path, count: int, seed: int) -> None:
    """`count` mutations of step 3: each is rejected with K002, and step 2 is loaded instead."""
    shutil.copytree(good, folder)
    engine = Engine(jobs.groups(), "dp=1", device="cpu", directory=folder)
    expected = read_checkpoint_tensors(good / "step-000002")["model/0.weight"]
    newest = folder / "step-000003"
    for number in range(count):
        draw = random.Random(f"{seed}-{number}")
        shutil.rmtree(newest)
        shutil.copytree(good / "step-000003", newest)
        MUTATIONS[number % len(MUTATIONS)](newest, draw)
        with torch.no_grad():
            next(engine.model.parameters()).zero_()
        used = engine.resume()
        assert used is not None and used.name == "step-000002", f"mutation {number} was believed"
        assert [p.code for p in engine.checkpoints.damaged_found] == ["K002"], number
        problem = engine.checkpoints.damaged_found[0]
        assert problem.what.startswith(str(newest)) and problem.why and len(str(problem)) < 1000, problem
        assert torch.equal(next(engine.model.parameters()), expected) and engine.position.step == 2
        assert verify_checkpoint(newest)[1], f"mutation {number} passes `verify`"


@pytest.mark.slow
def test_every_mutation_is_refused(good: Path, tmp_path: Path) -> None:
    refused(good, tmp_path / "mutated", 250, seed=1)


@pytest.mark.prove
def test_every_one_of_many_mutations_is_refused(good: Path, tmp_path: Path) -> None:
    refused(good, tmp_path / "mutated", 20_000, seed=2)


@pytest.mark.parametrize("dtype", ["F64", "I32", "F16"])
def test_dtype_that_the_files_contradict_is_damage(good: Path, tmp_path: Path, dtype: str) -> None:
    """Such a file does not belong to another job's checkpoint (K003), so an older one is loaded."""
    shutil.copytree(good, tmp_path / "forged")
    manifest = tmp_path / "forged" / "step-000003" / MANIFEST_NAME
    content = unseal_json(manifest.read_bytes())
    content["tensors"]["model/0.weight"]["dtype"] = dtype
    manifest.write_bytes(seal_json(content))
    engine = Engine(jobs.groups(), "dp=1", device="cpu", directory=tmp_path / "forged")
    used = engine.resume()
    assert used is not None and used.name == "step-000002"
    assert [p.code for p in engine.checkpoints.damaged_found] == ["K002"]


def test_unchanged_is_believed(good: Path, tmp_path: Path) -> None:
    """The tests above can fail: an intact checkpoint is accepted."""
    shutil.copytree(good, tmp_path / "same")
    engine = Engine(jobs.groups(), "dp=1", device="cpu", directory=tmp_path / "same")
    used = engine.resume()
    assert used is not None and used.name == "step-000003" and not engine.checkpoints.damaged_found
    assert all(not verify_checkpoint(path)[1] for path in engine.checkpoints.list_published())


def test_nothing_good_is_said(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "bad")
    for path in (tmp_path / "bad").iterdir():
        flip(path / MANIFEST_NAME, random.Random(1))
    engine = Engine(jobs.groups(), "dp=1", device="cpu", directory=tmp_path / "bad")
    before = [p.clone() for p in engine.model.parameters()]
    with pytest.raises(PlaitError) as caught:
        engine.resume(missing_ok=True)
    assert caught.value.codes == ["K002"] * 3
    assert all(map(torch.equal, before, engine.model.parameters())), "something damaged was read into the model"


@pytest.mark.parametrize("plan", ("dp=2", "fsdp=2"))
def test_damage_one_rank_sees_is_damage_to_all(tmp_path: Path, plan: str) -> None:
    """Under fsdp each rank reads its own parts, so only one of them sees the flipped bit. All ranks fall back together."""
    train_and_save(tmp_path, "fsdp=2", (1, 2))
    for victim in sorted((tmp_path / "step-000002").glob("*.safetensors")):
        content = bytearray(victim.read_bytes())
        victim.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

        def rank(place: Any) -> list[str]:
            engine = Engine(jobs.groups(), Plan.parse(plan), device="cpu", directory=tmp_path, place=place)
            used = engine.resume()
            return [used.name if used else "", *(p.what for p in engine.checkpoints.damaged_found)]

        said = fork.run_ranks(rank, 2, fork.Listener(lambda *_: None))
        assert said[0] == ["step-000001", f"{victim} is damaged"], said
        victim.write_bytes(content)


def test_a_damaged_checkpoint_is_replaced_by_the_next_save_of_its_step(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    shutil.copytree(good, folder)
    flip(folder / "step-000003/model-00000.safetensors", random.Random(2))
    engine = Engine(jobs.groups(), "dp=1", device="cpu", directory=folder)
    engine.resume()
    engine.step(next(engine.batches()))
    engine.save(keep=2)
    assert [p.name for p in engine.checkpoints.list_published()] == ["step-000003", "step-000002"]
    assert not verify_checkpoint(folder / "step-000003")[1]
