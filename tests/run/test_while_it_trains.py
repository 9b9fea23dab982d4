"""Outputs of a run during training: weights in complete folders, and samples of generated text."""

import json
import threading
from pathlib import Path
from typing import Any

import jobs_real
import pytest
import torch
from launched import TEST_JOB, Command
from rarely import sampled
from safetensors.torch import load_file
from saved import read_checkpoint_tensors

import plait
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.integrations.export_weights import LINK_PREFIX, link_files
from plait.launch import fork
from plait.launch.place import Place
from plait.launch.supervisor import Listener

PROMPTS = [[3], [1, 4, 1, 5, 9], [2, 6]]
pytestmark = pytest.mark.timeout(300)


def trained(at: Path, plan: str, steps: int, every: int, **options: Any) -> list[dict[str, Any]]:
    """A run that saves every second step and keeps one checkpoint, with an export every `every` steps and samples."""

    def run(place: Place) -> dict[str, Any]:
        with torch.random.fork_rng():
            engine = Engine(jobs_real.llama(), plan, place=place, directory=at / "checkpoints")
            exports = plait.ExportWeights(every, **options)
            samples = plait.Generate(
                PROMPTS, every=2, decode=lambda tokens: "-".join(map(str, tokens)), max_new_tokens=3
            )
            callbacks = [exports, samples]
            engine.checkpoints.on_published = lambda path: exports.on_save(engine, path)
            if engine.checkpoints.list_published():
                engine.resume()
            for callback in callbacks:
                callback.on_start(engine)
            for batch in engine.batches():
                step = engine.step(batch)
                for callback in callbacks:
                    callback.on_step(engine, step)
                if step.step % 2 == 0:
                    engine.save(keep=1, wait=True)
                if step.step == steps:
                    break
            exports.on_end(engine)
            return {"texts": engine.generate(PROMPTS, max_new_tokens=3)}

    listener = Listener(on_text=lambda _, text: print(text.decode(), end="", flush=True))
    return fork.run_ranks(run, Plan.parse(plan).world, listener)


class Reader(threading.Thread):
    """Polls `latest`, and opens each export as soon as it exists."""

    def __init__(self, folder: Path):
        super().__init__()
        self.folder, self.over, self.wrong, self.seen = folder, threading.Event(), list[str](), dict[str, int]()

    def run(self) -> None:
        while not self.over.wait(0.001):
            try:
                found = (self.folder / "latest").resolve(strict=True)
            except OSError:
                continue
            if found.name not in self.seen:
                try:
                    self.seen[found.name] = len(load_file(found / "model.safetensors"))
                    json.loads((found / "config.json").read_text())
                except Exception as error:
                    self.wrong.append(f"{found.name}: {error}")


@pytest.mark.parametrize("plan", sampled(2, ("fsdp=2", "tp=2")))
def test_what_is_exported_is_the_checkpoint_of_its_step(plan: str, tmp_path: Path) -> None:
    about = tmp_path / "hf"
    about.mkdir()
    (about / "config.json").write_text('{"model_type": "llama"}')
    reader = Reader(tmp_path / "export")
    reader.start()
    try:
        trained(tmp_path, plan, 6, 2, keep=2)
    finally:
        reader.over.set()
        reader.join()
    folder = tmp_path / "export"
    assert reader.wrong == [] and reader.seen and len(set(reader.seen.values())) == 1
    assert sorted(p.name for p in folder.iterdir() if p.name != "latest")[-1] == "step-000006"
    assert len([p for p in folder.iterdir() if p.name != "latest"]) <= 2
    assert (folder / "latest").resolve() == (folder / "step-000006").resolve()
    found, kept = load_file(folder / "latest" / "model.safetensors"), read_checkpoint_tensors(tmp_path / "checkpoints" / "step-000006")
    weights = {name.removeprefix("model/"): t for name, t in kept.items() if name.startswith("model/")}
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)
    assert json.loads((folder / "latest" / "config.json").read_text()) == {"model_type": "llama"}
    assert not [*folder.glob("*.tmp"), *(tmp_path / "checkpoints").glob(f"{LINK_PREFIX}*")]


@pytest.mark.slow
def test_samples_are_written_once_per_step_also_after_a_resume(tmp_path: Path) -> None:
    trained(tmp_path, "dp=2", 5, 100)
    with open(tmp_path / "samples.jsonl", "a") as file:
        file.write('{"step": 5, "prompt": 0, "tok')  # torn by a kill after the checkpoint of step 4
    said = trained(tmp_path, "pp=2", 6, 100)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(row["step"], row["prompt"]) for row in rows] == [(step, i) for step in (2, 4, 6) for i in range(3)]
    assert all(row["text"] == "-".join(map(str, row["tokens"])) for row in rows)
    assert all(rank["texts"] == [row["tokens"] for row in rows[-3:]] for rank in said)


def test_sixteen_bits_and_a_folder_of_ones_own(tmp_path: Path) -> None:
    trained(tmp_path, "dp=1", 2, 2, dtype="bf16", folder=tmp_path / "served")
    found = load_file(tmp_path / "served" / "step-000002" / "model.safetensors")
    kept = read_checkpoint_tensors(tmp_path / "checkpoints" / "step-000002")
    assert all(torch.equal(t, kept[f"model/{name}"].bfloat16()) for name, t in found.items())


def test_an_export_that_fails_is_said_and_training_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "export").write_text("in the way")
    assert len(trained(tmp_path, "dp=1", 4, 2)) == 1
    said = capfd.readouterr().out
    assert said.count("are not exported; training continues: [K009] ") == 2 and "step-000004" in said
    assert said.count("File exists") + said.count("Not a directory") == 2


def test_a_checkpoint_that_is_pruned_is_still_read(tmp_path: Path) -> None:
    trained(tmp_path, "dp=1", 2, 100)
    checkpoint = tmp_path / "checkpoints" / "step-000002"
    before, beside = read_checkpoint_tensors(checkpoint), link_files(checkpoint)
    for file in checkpoint.iterdir():
        file.unlink()
    after = read_checkpoint_tensors(beside)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.slow
def test_the_command_exports(tmp_path: Path) -> None:
    words = ("train", TEST_JOB, "--nproc", "2", "--save-every", "5", "--export-every", "10", "--export-dir", "served")
    command = Command(*words, folder=tmp_path)
    assert command.wait() == 0, command.output
    assert {"step-000030", "latest"} <= {p.name for p in (tmp_path / "served").iterdir()}
    kept = read_checkpoint_tensors(tmp_path / "runs/latest/checkpoints/step-000030")
    found = load_file(tmp_path / "served/latest/model.safetensors")
    assert all(torch.equal(t, kept[f"model/{name}"]) for name, t in found.items())


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--export-every", "150"), "U002", "not a multiple of --save-every"),
        (("--export-every", "0"), "U002", "--export-every 0"),
        (("--export-dir", "x"), "U002", "without --export-every"),
        (("--tracker", "aim"), "U002", "unknown tracker"),
        (
            ("--tracker", "tensorboard", "--plan", "replica_groups=2 outer_sync=async"),
            "H020",
            "--tracker does not work with outer_sync=async",
        ),
    ],
)
def test_options_that_cannot_be(words: tuple[str, ...], code: str, said: str, tmp_path: Path) -> None:
    command = Command("train", TEST_JOB, *words, folder=tmp_path)
    assert command.wait() == 2
    assert code in command.output and said in command.output


def test_values_that_cannot_be() -> None:
    for make in (
        lambda: plait.ExportWeights(0),
        lambda: plait.ExportWeights(1, dtype="int8"),
        lambda: plait.Generate([], -1),
    ):
        with pytest.raises(PlaitError) as caught:
            make()
        assert caught.value.codes == ["U018"]
