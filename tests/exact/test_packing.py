"""Packed rows: their loss and gradients equal those of separate documents, and each plan trains like one device."""

from typing import Any

import jobs_packed
import pytest
import torch
from jobs_packed import MODELS, TOKENS, Documents
from rarely import every, sampled
from torch import Tensor, nn

import plait
from plait import PlaitError
from plait.config.plan import Plan
from plait.data.packing import best_fit
from plait.proof.verify import verify

PLANS = (
    "dp=2 microbatches=2", "fsdp=2", "tp=2", "pp=2 microbatches=2", "cp=2", "cp=2 cp_method=ulysses", "dp=2 tp=2", "cp=2 dp=2",
)  # fmt: skip
CASES = [(model, text) for text in PLANS for model in MODELS]


def gradients(model: nn.Module, losses: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    losses.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def summed(model: nn.Module, inputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    outputs = model(**inputs)
    logits = getattr(outputs, "logits", outputs)
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


def alone(model: nn.Module, documents: Documents) -> Tensor:
    """The loss of separate documents, each token predicted from those before it: no packing, and no code of plait."""
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(documents)):
        ids, labels = (torch.tensor(documents[i][name])[None] for name in ("input_ids", "labels"))
        inputs = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None]}
        outputs = model(**inputs)
        logits = getattr(outputs, "logits", outputs)[:, :-1]
        wanted = labels[:, 1:]
        total = total + nn.functional.cross_entropy(
            logits.flatten(0, 1), wanted.flatten(), ignore_index=-100, reduction="sum"
        )
    return total


@pytest.mark.parametrize(
    "make, near",
    [
        (MODELS["own"], 1e-12),
        *((MODELS[name], 1e-12) for name in ("llama", "gpt2")),
        *((lambda name=name: MODELS[name]("eager"), 1e-6) for name in ("llama", "gpt2")),  # a softmax in float32
    ],
)
def test_packed_rows_are_their_documents_one_by_one(make: Any, near: float) -> None:
    torch.manual_seed(0)
    model, documents = make().double(), Documents(30)
    rows = plait.packed(documents, TOKENS)
    pairs = [rows[i] for i in range(len(rows))]
    inputs = {name: torch.stack([x[name] for x, _ in pairs]) for name in ("input_ids", "position_ids")}
    targets = torch.stack([y for _, y in pairs])
    together, one_by_one = summed(model, inputs, targets), alone(model, documents)
    torch.testing.assert_close(together, one_by_one, rtol=near, atol=0)
    expected = gradients(model, one_by_one)
    for name, found in gradients(model, summed(model, inputs, targets)).items():
        torch.testing.assert_close(found, expected[name], rtol=1e3 * near, atol=near)


@pytest.mark.parametrize("model, text", sampled(7, every(5, CASES)))
def test_packed_jobs_are_equal(model: str, text: str) -> None:
    verdict = verify(jobs_packed.job(model), Plan.parse(text))
    assert verdict.equal and not verdict.inexact, verdict.to_dict()


def test_rows_are_full_and_have_every_token_once() -> None:
    documents = Documents(200)
    rows = plait.packed(documents, TOKENS)
    assert sorted(piece[0] for row in rows.rows for piece in row) == list(range(200))
    used, needed = len(rows) * TOKENS, sum(map(len, documents.rows))
    assert used < 1.05 * needed, (used, needed)
    for i, row in enumerate(rows.rows):
        inputs, targets = rows[i]
        begins = (inputs["position_ids"] == 0).nonzero().flatten().tolist()
        filled = sum(count for _, _, count in row)
        assert begins == sorted({sum(c for _, _, c in row[:k]) for k in range(len(row) + (filled < TOKENS))})
        assert all(targets[begin - 1] == -100 for begin in begins if begin)


def test_counting_documents_has_an_end_and_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Endless:
        def __init__(self, size: int):
            self.size = size

        def __len__(self) -> int:
            return self.size

        def __getitem__(self, i: int) -> dict[str, list[int]]:
            return {"input_ids": [1, 2, 3]}

    with pytest.raises(PlaitError, match="has 1,000,000,000,000,000 documents") as caught:
        plait.packed(Endless(10**15), 8)
    assert caught.value.codes == ["J029"]
    assert len(plait.packed(Endless(10), 6)) == 5 and not capsys.readouterr().err
    monkeypatch.setattr("plait.data.packing.NOTE_AFTER_S", 0.0)
    plait.packed(Endless(10), 6)
    assert capsys.readouterr().err.count("note  packed() reads 10 documents to count their tokens, 1 so far") == 1


def test_best_fit_is_a_function_of_the_lengths() -> None:
    lengths = torch.randint(1, 13, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = best_fit(lengths, 12)
    assert sorted(i for row in rows for i in row) == list(range(500)) and rows == best_fit(list(lengths), 12)
    assert all(sum(lengths[i] for i in row) <= 12 for row in rows)


def test_a_long_document_is_cut_and_nothing_is_lost() -> None:
    ids = list(range(1, 30))
    rows = plait.packed([{"input_ids": ids}], 12)
    pairs = [rows[i] for i in range(len(rows))]
    known = {int(x): int(y) for inputs, targets in pairs for x, y in zip(inputs["input_ids"], targets) if y != -100}
    assert known == {i: i + 1 for i in range(1, 29)} and len(rows) == 3


def test_targets_are_those_of_the_next_place_or_of_their_own() -> None:
    pair, own = [(torch.tensor([5, 6]), torch.tensor([6, 7]))], [{"input_ids": [5, 6, 7]}]
    assert plait.packed(pair, 3)[0][1].tolist() == [6, 7, -100]
    assert plait.packed(pair, 3, shifted=False)[0][1].tolist() == [-100, 6, -100]
    assert plait.packed(own, 4)[0][1].tolist() == [6, 7, -100, -100]
    assert plait.packed(own, 4, shifted=False)[0][1].tolist() == [-100, 6, 7, -100]
    assert plait.packed(own, 4, pad=9)[0][0]["input_ids"].tolist() == [5, 6, 7, 9]


@pytest.mark.parametrize(
    "data, settings",
    [
        ([{"input_ids": [1, 2], "labels": [1]}], {}),
        ([torch.ones(2)], {}),
        ([{"input_ids": [1, 2]}], {"lengths": [1, 2]}),
        ([{"input_ids": [1, 2]}], {"lengths": [3]}),
        ([{"input_ids": [0.5]}], {}),
    ],
)
def test_what_is_no_document_is_refused(data: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(PlaitError, match="J029"):
        plait.packed(data, 4, **settings)[0]


def test_a_mask_that_lets_documents_see_each_other_is_another_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: a causal mask alone gives a different loss."""
    causal = lambda places: torch.ones(places.shape[-1], places.shape[-1], dtype=torch.bool).tril()[None, None]  # noqa: E731
    monkeypatch.setattr(plait, "document_mask", causal)
    with pytest.raises(AssertionError):
        test_packed_rows_are_their_documents_one_by_one(MODELS["own"], 1e-12)
