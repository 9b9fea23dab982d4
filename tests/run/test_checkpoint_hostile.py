"""Hostile checkpoints and weights are rejected by name, at once, by every command that reads them."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jobs
import pytest
from unit.test_hostile_files import KINDS

from plait import Engine, PlaitError
from plait.checkpoint.foreign_weights import INDEX_NAME, open_weights
from plait.checkpoint.manifest import MANIFEST_NAME, parse_manifest, seal_json, unseal_json
from plait.checkpoint.safetensors_file import DamagedFileError, ShardFile, find_tiling_error
from plait.cli.main import main
from run.test_checkpoint_damage import train_and_save


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2 of one rank."""
    folder = tmp_path_factory.mktemp("good")
    train_and_save(folder, "dp=1", (1, 2))
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", (MANIFEST_NAME, "model-00000.safetensors"))
def test_something_else_in_place_of_a_file(good: Path, tmp_path: Path, kind: str, file: str, capfd: Any) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(good, folder)
    victim = folder / "step-000002" / file
    victim.unlink()
    KINDS[kind](victim)
    engine = Engine(jobs.groups(), "dp=1", device="cpu", directory=folder)
    used = engine.resume()
    assert used is not None and used.name == "step-000001"
    assert [p.code for p in engine.checkpoints.damaged_found] == ["K002"]
    for words, code in (("list", 0), ("info", 2), ("verify", 1), ("export", 2)):
        if words == "info" and file != MANIFEST_NAME:
            continue  # it reads only the manifest
        to = ["--output", str(tmp_path / "out")] if words == "export" else []
        assert main(["checkpoint", words, str(folder / "step-000002"), *to]) == code, words
        said = capfd.readouterr()
        assert file in said.out + said.err and "Traceback" not in said.err
    with pytest.raises(PlaitError) as caught:
        open_weights(folder / "step-000002")
    assert set(caught.value.codes) <= {"K002", "K007"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", (INDEX_NAME, "model-00001-of-00004.safetensors", "model.safetensors"))
def test_something_else_in_a_folder_of_hugging_face(good: Path, tmp_path: Path, kind: str, file: str) -> None:
    folder = tmp_path / "hf"
    limit = "5GB" if file == "model.safetensors" else "100B"
    assert main(["checkpoint", "export", str(good), "--output", str(folder), "--shard", limit]) == 0
    victim = folder / file
    if not victim.exists():
        victim = sorted(folder.glob("*.safetensors"))[0]
    victim.unlink()
    KINDS[kind](victim)
    with pytest.raises(PlaitError) as caught:
        open_weights(folder)
    assert set(caught.value.codes) <= {"K002", "K007"} and "Traceback" not in str(caught.value)


def header(path: Path, text: bytes, body: bytes = b"") -> Path:
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


ODD: tuple[Any, ...] = (
    -1, 2**63, 10**30, 1.5, float("nan"), float("inf"), 1e308, "3", "", "x" * 5000, "\x1b[31m", None, True, [], {}, [[]], [0] * 999,
    [2**61] * 9,
)  # fmt: skip


def test_headers_of_safetensors(tmp_path: Path) -> None:
    told = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    ShardFile(header(tmp_path / "good.safetensors", json.dumps(told).encode(), bytes(8)))
    texts = [json.dumps(changed) for changed in changes(told) if changed != told]
    texts += ["[" * 100_000, '{"a":' * 20_000, "", "null", "[]", '{"a": {}, "a": {}}', '{"a": 1' + "0" * 5000 + "}"]
    wide = {"a": {"dtype": "F32", "shape": [2**61] * 100_000, "data_offsets": [0, 8]}}
    for text in (*texts, json.dumps(wide)):
        path = header(tmp_path / "x.safetensors", text.encode(), bytes(8))
        with pytest.raises(PlaitError) as caught:
            open_weights(path)
        assert caught.value.codes == ["K002"] and len(str(caught.value)) < 1000, text[:100]
    for size in (0, 7, 8):
        (tmp_path / "x.safetensors").write_bytes(b"\xff" * size)
        with pytest.raises(PlaitError):
            open_weights(tmp_path / "x.safetensors")


def changes(value: Any) -> Any:
    """Yields the JSON value with each of its parts, in turn, replaced, removed or renamed."""
    for odd in ODD:
        if type(odd) is not type(value) or odd != value:
            yield odd
    if isinstance(value, dict):
        for key, part in value.items():
            for changed in changes(part):
                yield {**value, key: changed}
            yield {k: v for k, v in value.items() if k != key}
    elif isinstance(value, list):
        for i, part in enumerate(value):
            for changed in changes(part):
                yield [*value[:i], changed, *value[i + 1 :]]
            yield value[:i] + value[i + 1 :]


def test_every_part_of_a_manifest_made_something_else(good: Path, tmp_path: Path) -> None:
    """Each change is rejected as damage, or gives a valid manifest. Many thousand changes raise no other error."""
    content = unseal_json((good / "step-000002" / MANIFEST_NAME).read_bytes())
    refused = believed = 0
    for changed in changes(content):
        try:
            parse_manifest(changed) if isinstance(changed, dict) else unseal_json(seal_json({"x": changed}))
        except DamagedFileError as error:
            refused += 1
            assert len(error.why) < 1000
        else:
            believed += 1
    assert refused > believed > 0, (refused, believed)


def test_a_wrong_value_is_named_by_its_place(good: Path) -> None:
    content = unseal_json((good / "step-000002" / MANIFEST_NAME).read_bytes())
    content["tensors"]["model/0.weight"]["pieces"][0]["start"][1] = -1
    with pytest.raises(DamagedFileError, match=r"`\$.tensors\[...\].pieces\[0\].start\[1\]`"):
        parse_manifest(content)


def test_a_count_of_replica_groups_costs_nothing(good: Path) -> None:
    content = unseal_json((good / "step-000002" / MANIFEST_NAME).read_bytes())
    with pytest.raises(DamagedFileError, match="2305843009213693952 replica groups are not 0"):
        parse_manifest(content | {"groups": {"count": 2**61, "own": {}, "sent": []}})


@pytest.mark.slow
def test_pieces_side_by_side_without_end() -> None:
    columns = [((0, i), (4, 1)) for i in range(100_000)]
    assert find_tiling_error((4, 100_000), columns) is None
    stairs = [((i % 3, i), (2, 1)) for i in range(20_000)]
    assert "too many" in (find_tiling_error((4, 20_000), stairs) or "")
    assert find_tiling_error((4, 100_000), [*columns, ((1, 70_000), (1, 1))]) is not None
    assert "overlap" in (find_tiling_error((4, 100), [*columns[:100], ((1, 70), (1, 1))]) or "")
    assert find_tiling_error((2, 3), [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((1, 0), (1, 2))]) is None, "not in rows"


def test_names_that_no_file_can_have(tmp_path: Path, capfd: Any) -> None:
    for path in ("x" * 5000, "a\0b", "/dev/zero", os.devnull):
        for action in ("list", "info", "verify", "export"):
            assert main(["checkpoint", action, path, "--output", str(tmp_path / "out")]) == 2, (path, action)
    assert "Traceback" not in capfd.readouterr().err
