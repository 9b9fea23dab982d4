"""A notebook: its example runs, and a cell can be stopped, can fail, and can train again, as in a script."""

from collections.abc import Iterator
from pathlib import Path

import pytest

nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]  # Jupyter's own

EXAMPLE = Path(__file__).parents[2] / "examples" / "notebooks" / "first_steps.ipynb"
JOB = """
import os, threading, time, torch, plait
from torch import nn
from torch.nn.functional import mse_loss

class Waves:
    def __len__(self): return 64
    def __getitem__(self, i):
        x = torch.tensor([6.0 * i / 64 - 3.0])
        return x, x.sin()

def small(steps=4, pause=0.0, wrong=False):
    def loss(outputs, targets):
        if wrong:
            raise ValueError("no loss today")
        print("said by a rank")
        time.sleep(pause)
        return mse_loss(outputs, targets)
    return plait.Job(model=lambda: nn.Linear(1, 1), loss=loss, data=Waves,
                     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), batch=8, steps=steps)
"""
INTERRUPTED = """
def interrupt():  # as the button does: SIGINT to the kernel
    while not os.path.exists("runs/small-1/metrics.jsonl") or not os.path.getsize("runs/small-1/metrics.jsonl"):
        time.sleep(0.02)
    os.kill(os.getpid(), 2)

threading.Thread(target=interrupt).start()
run = plait.train(small, nproc=2, arguments={"steps": 1000, "pause": 0.1}, check="none")
print("stopped:", run.stopped, run.steps < 1000, run.checkpoint is not None)
run
"""
AGAIN = """
torch.set_num_threads(2)
torch.randn(4_000_000).exp().sum()  # OpenMP has threads now
run = plait.train(small, check="none")
print("again:", run.stopped, run.steps, torch.get_num_threads())
"""
FAILS = 'plait.train(small, nproc=2, arguments={"wrong": True}, check="none")'


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[object]:
    """Runs cells in a kernel with a new working folder. Returns the outputs of each cell."""
    book = nbformat.v4.new_notebook()
    client = nbclient.NotebookClient(
        book, timeout=200, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}
    )
    with client.setup_kernel():

        def run(source: str) -> list[dict[str, object]]:
            book.cells.append(nbformat.v4.new_code_cell(source))
            return client.execute_cell(book.cells[-1], len(book.cells) - 1).outputs

        yield run


def printed(outputs: list) -> str:
    return "".join(one["text"] for one in outputs if one["output_type"] == "stream")


def shown(outputs: list, kind: str) -> list[str]:
    return [one["data"][kind] for one in outputs if "data" in one and kind in one["data"]]


@pytest.mark.slow
def test_a_cell_is_stopped_fails_and_trains_again(kernel) -> None:
    assert kernel(JOB) == []
    stopped = kernel(INTERRUPTED)
    text = printed(stopped)
    assert "stopped: True True True" in text and 'resume="runs/small-1" continues' in text
    assert "said by a rank" in text and "[rank 1]" not in text and "\x1b" not in text
    assert "<svg" in shown(stopped, "text/html")[0]
    failed = kernel(FAILS)
    (error,) = (one for one in failed if one["output_type"] == "error")
    assert error["traceback"][0].startswith("error[C005]") and len(error["traceback"]) < 10
    assert "ValueError: no loss today" in error["evalue"]
    assert "again: False 4 2" in printed(kernel(AGAIN))


@pytest.mark.slow
def test_the_example_runs(tmp_path: Path) -> None:
    book = nbformat.read(EXAMPLE, 4)
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells), "strip its outputs"
    nbclient.NotebookClient(book, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    (line, *_) = [one for cell in cells for one in cell.outputs if one["output_type"] == "display_data"]
    assert line["data"] == {"text/plain": ""}, "the live line is written over, and taken away at the end"
    assert [found for cell in cells for found in shown(cell.outputs, "text/plain")].count("True") == 1, "EQUAL"
    assert any("<svg" in found for cell in cells for found in shown(cell.outputs, "text/html"))
    accuracy = float(shown(cells[-3].outputs, "text/plain")[0])
    assert accuracy > 0.8 and shown(cells[-2].outputs, "text/plain")[-1].startswith("(160, ")
    assert "<svg" in shown(cells[-1].outputs, "text/html")[0]
