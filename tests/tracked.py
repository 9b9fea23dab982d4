"""Read the metrics of a run back with each tracker's own reader: `python tests/tracked.py RUN` prints them as JSON.

Tracker -> name -> [[step, value], …], in the order of logging. It is a separate process, since the packages warn, start threads and take
seconds to import.
"""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Told = dict[str, list[list[float]]]


def read_back(run: Path, environment: dict[str, str]) -> dict[str, Told]:
    """Return the metrics of all four trackers."""
    words = [sys.executable, __file__, str(run.resolve())]
    quiet = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    done = subprocess.run(
        words, env={**os.environ, **quiet, **environment}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def tensorboard(run: Path) -> Told:
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator  # as TensorBoard itself

    read = EventAccumulator(str(run / "tensorboard"), size_guidance={"tensors": 0})
    read.Reload()
    names = [name for name in read.Tags()["tensors"] if name != "run/text_summary"]
    return {name: [[e.step, e.tensor_proto.double_val[0]] for e in read.Tensors(name)] for name in names}


def wandb(run: Path) -> Told:
    from wandb.proto import wandb_internal_pb2

    found: Told = {}
    for file in sorted(run.glob("wandb/offline-run-*/run-*.wandb")):
        for data in records(file.read_bytes()[7:], 7):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items: dict[str, Any] = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
            }
            for name, value in items.items():
                if not name.startswith("_"):
                    found.setdefault(name, []).append([items["_step"], value])
    return found


def records(data: bytes, offset: int) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format: blocks of 32 KiB with full records, or with the first, middle and last parts of one."""
    whole, at = b"", 0
    while at + 7 <= len(data):
        left = 32768 - (at + offset) % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def mlflow(run: Path) -> Told:
    from mlflow import MlflowClient

    client = MlflowClient((run / "mlflow").as_uri())
    (found,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert found.info.status == "FINISHED" and found.data.params["job.loud"] == "false"
    return {
        name: [[m.step, m.value] for m in client.get_metric_history(found.info.run_id, name)]
        for name in found.data.metrics
    }


def trackio(run: Path) -> Told:
    from trackio.sqlite_storage import SQLiteStorage

    found: Told = {}
    for row in SQLiteStorage.get_logs("training", run.name):
        for name in row.keys() - {"step", "timestamp"}:
            found.setdefault(name, []).append([row["step"], row[name]])
    return found


if __name__ == "__main__":
    run = Path(sys.argv[1])
    print(json.dumps({read.__name__: read(run) for read in (tensorboard, wandb, mlflow, trackio)}))
