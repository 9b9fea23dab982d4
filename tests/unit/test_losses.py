"""The loss without logits: equal to torch's in float64, small in memory, and with clear errors for unsupported arguments."""

import copy
import dataclasses
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from plait import Evaluate, LinearCrossEntropy, PlaitError, linear_cross_entropy
from plait.engine.engine import Engine
from plait.launch.place import Place
from plait.losses.linear_cross_entropy import HeadOutput
from plait.tensors.torch_private import dataclass_leaves


def drawn(dtype: torch.dtype = torch.float64, bias: bool = True) -> tuple[list[Tensor], Tensor]:
    """hidden [3, 7, 5], weight [11, 5] (and bias [11]). Some of the targets [3, 7] are ignored."""
    g = torch.Generator().manual_seed(1)
    shapes = [(3, 7, 5), (11, 5), (11,)][: 3 if bias else 2]
    tensors = [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]
    targets = torch.randint(0, 11, (3, 7), generator=g)
    targets[0, :4] = targets[2, 6] = -100
    return tensors, targets


def whole(tensors: list[Tensor], targets: Tensor, ignore_index: int = -100) -> Tensor:
    logits = F.linear(tensors[0], tensors[1], tensors[2] if len(tensors) > 2 else None)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=ignore_index)


def chunked(tensors: list[Tensor], targets: Tensor, chunk: int, ignore_index: int = -100) -> Tensor:
    bias = tensors[2] if len(tensors) > 2 else None
    return linear_cross_entropy(tensors[0], tensors[1], targets, bias, ignore_index, chunk)


@pytest.mark.parametrize("chunk", [1, 4, 7, 21, 1024])
@pytest.mark.parametrize("bias", [True, False])
def test_loss_and_gradients_are_those_of_cross_entropy(bias: bool, chunk: int) -> None:
    tensors, targets = drawn(bias=bias)
    expected, actual = whole(tensors, targets), chunked(tensors, targets, chunk)
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)
    for a, e in zip(torch.autograd.grad(-3.5 * actual, tensors), torch.autograd.grad(-3.5 * expected, tensors)):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_the_numbers() -> None:
    tensors, targets = drawn()
    assert torch.autograd.gradcheck(lambda *t: chunked(list(t), targets, 4), tensors)


@pytest.mark.parametrize("ignored", [0, -1])
def test_another_target_is_ignored(ignored: int) -> None:
    tensors, targets = drawn()
    targets = torch.where(targets < 0, ignored, targets)
    expected, actual = whole(tensors, targets, ignored), chunked(tensors, targets, 4, ignored)
    torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)


def test_no_target_counts() -> None:
    tensors, targets = drawn()
    loss = chunked(tensors, torch.full_like(targets, -100), 4)
    assert loss.isnan()
    assert all(not g.any() for g in torch.autograd.grad(loss, tensors))


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2)])
def test_only_what_needs_a_gradient_has_one(needed: tuple[int, ...]) -> None:
    tensors, targets = drawn()
    expected = torch.autograd.grad(whole(tensors, targets), [tensors[i] for i in needed])
    mine = [t.detach().requires_grad_(i in needed) for i, t in enumerate(tensors)]
    chunked(mine, targets, 4).backward()
    assert [i for i, t in enumerate(mine) if t.grad is not None] == list(needed)
    for i, e in zip(needed, expected):
        torch.testing.assert_close(mine[i].grad, e, rtol=1e-12, atol=1e-12)


def test_a_tied_weight_gets_both_gradients_and_backward_runs_twice() -> None:
    (_, weight), targets = drawn(bias=False)
    tokens = targets.clamp(min=0)
    expected = torch.autograd.grad(whole([F.embedding(tokens, weight).sin(), weight], targets), weight)[0]
    loss = chunked([F.embedding(tokens, weight).sin(), weight], targets, 4)
    for _ in range(2):
        (actual,) = torch.autograd.grad(loss, weight, retain_graph=True)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("format", [torch.bfloat16, torch.float16])
def test_mixed_precision_is_as_exact_as_torchs(format: torch.dtype) -> None:
    """16-bit products, 32-bit softmax and sums, as autocast does, with an error against float64 no larger than autocast's."""
    tensors, targets = drawn(torch.float32)
    truth = torch.autograd.grad(whole([t.double() for t in tensors], targets), tensors)
    with torch.autocast("cpu", dtype=format):
        expected, actual = whole(tensors, targets), chunked(tensors, targets, 4)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    theirs, mine = torch.autograd.grad(expected, tensors), torch.autograd.grad(actual, tensors)
    for m, e, t in zip(mine, theirs, truth):
        assert m.dtype == torch.float32
        assert float((m - t).norm()) <= 1.5 * float((e - t).norm()) + 1e-6


def test_small_gradients_survive_fp16() -> None:
    """They are stored as sums and divided when the scaled gradient arrives. An average over many tokens would underflow."""
    g = torch.Generator().manual_seed(1)
    hidden = (torch.randn(4096, 8, generator=g) * 1e-3).half().requires_grad_()
    weight = (torch.randn(32, 8, generator=g) * 1e-3).half()
    targets = torch.randint(0, 32, (4096,), generator=g)
    wide = hidden.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(65536.0 * whole([wide, weight.double()], targets), wide)
    (actual,) = torch.autograd.grad(65536.0 * chunked([hidden, weight], targets, 1000), hidden)
    assert float((actual - expected).norm() / expected.norm()) < 2e-3


def test_sums_of_16_bit_weights_are_taken_in_32() -> None:
    tensors, targets = drawn(torch.bfloat16)
    truth = torch.autograd.grad(whole([t.double() for t in tensors], targets), tensors)
    for actual, expected in zip(torch.autograd.grad(chunked(tensors, targets, 1), tensors), truth):
        assert actual.dtype == torch.bfloat16
        assert float((actual - expected).norm() / expected.norm()) < 0.02


class Allocations(TorchDispatchMode):
    """Bytes of the largest new tensor, and the maximum that was alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.live = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in dataclass_leaves(args) if isinstance(t, Tensor)}
        for tensor in (t for t in dataclass_leaves(result) if isinstance(t, Tensor)):
            storage = tensor.untyped_storage()
            where, size = storage.data_ptr(), storage.nbytes()
            if where not in self.known | given and size:
                self.known.add(where)
                self.largest, self.live = max(self.largest, size), self.live + size
                self.most = max(self.most, self.live)
                weakref.finalize(storage, self.gone, where, size)
        return result

    def gone(self, where: int, size: int) -> None:
        self.known.discard(where)
        self.live -= size


@pytest.mark.slow
def test_the_logits_are_never_whole() -> None:
    """4,096 tokens with a vocabulary of 32,768: 512 MiB of logits, 32 MiB of them at a time."""
    tokens, vocabulary, width, chunk = 4096, 32768, 16, 256
    hidden, weight = torch.randn(tokens, width).requires_grad_(), torch.randn(vocabulary, width).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,))
    with Allocations() as seen:
        linear_cross_entropy(hidden, weight, targets, chunk=chunk).backward()
    block = chunk * vocabulary * 4
    assert seen.largest == block < tokens * vocabulary * 4 / 10
    assert 2 * block <= seen.most < 2 * block + 4 * (weight.nbytes + hidden.nbytes)
    assert weight.grad is not None
    with torch.no_grad(), Allocations() as less:
        linear_cross_entropy(hidden, weight, targets, chunk=chunk)
    assert less.largest == block
    assert less.most < 2 * block + weight.nbytes


class Gpt(nn.Module):
    """An embedding, a layer and a head. `after` processes the logits."""

    def __init__(self, bias: bool = False, after: Any = lambda logits: logits):
        super().__init__()
        self.embed, self.layer, self.lm_head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=bias)
        self.after = after

    def forward(self, x: Tensor) -> Any:
        return self.after(self.lm_head(self.layer(self.embed(x)).tanh()))


def test_evaluation_gets_logits_and_training_does_not() -> None:
    loss, model = LinearCrossEntropy(), Gpt(bias=True)
    x, targets = torch.randint(0, 11, (3, 7)), torch.randint(0, 11, (3, 7))
    expected = F.cross_entropy(model(x).flatten(0, 1), targets.flatten())
    loss.attach(model)
    loss.attach(model)  # the second call changes nothing
    torch.testing.assert_close(loss(model(x), targets), expected)
    with torch.no_grad():
        assert isinstance(model(x), HeadOutput)
        assert isinstance(model.eval()(x), Tensor)
    assert isinstance(model(x), HeadOutput), "a model that is trained in eval mode"
    assert list(model.state_dict()) == list(Gpt(bias=True).state_dict())


def test_a_copy_of_an_attached_model_uses_its_own_weights() -> None:
    model = Gpt()
    LinearCrossEntropy().attach(model)
    other = copy.deepcopy(model)
    assert other(torch.zeros(1, 2, dtype=torch.long)).head.weight is other.lm_head.weight


@dataclasses.dataclass
class Out:
    extra: Tensor
    nested: dict[str, Any]


@pytest.mark.parametrize(
    "after",
    [lambda o: {"logits": o}, lambda o: (torch.zeros(2), [o]), lambda o: Out(torch.zeros(2), {"logits": o})],
)
def test_it_is_found_anywhere_in_the_outputs(after: Any) -> None:
    loss, model = LinearCrossEntropy(), Gpt(after=after)
    loss.attach(model)
    x = torch.randint(0, 11, (3, 7))
    assert loss(model(x), x).requires_grad


@pytest.mark.parametrize(
    ("after", "shown"),
    [
        (lambda o: o / 30.0, "(/)"),
        (lambda o: 30.0 * o, "(*)"),
        (lambda o: torch.tanh(o), "(tanh)"),
        (lambda o: o.float(), "(.float)"),
        (lambda o: o[:, :-1], "([…])"),
        (lambda o: torch.zeros(11) + o, "(add)"),
        (lambda o: F.cross_entropy(o, torch.zeros(3)), "(cross_entropy)"),
    ],
)
def test_a_model_that_computes_with_its_logits_is_refused(after: Any, shown: str) -> None:
    loss, model = LinearCrossEntropy(), Gpt(after=after)
    loss.attach(model)
    with pytest.raises(PlaitError, match="J017") as caught:
        model(torch.zeros(3, 7, dtype=torch.long))
    assert shown in caught.value.problems[0].what


@pytest.mark.parametrize(("after", "times"), [(lambda o: o.hidden, 0), (lambda o: (o, o), 2)])
def test_outputs_without_one_head_are_refused(after: Any, times: int) -> None:
    loss, model = LinearCrossEntropy(), Gpt(after=after)
    loss.attach(model)
    x = torch.zeros(3, 7, dtype=torch.long)
    with pytest.raises(PlaitError, match=f"J017.*lm_head {times} times, not once"):
        loss(model(x), x)


def test_targets_must_fit_the_tokens() -> None:
    loss, model = LinearCrossEntropy(), Gpt()
    loss.attach(model)
    x = torch.zeros(3, 7, dtype=torch.long)
    assert loss(Gpt_flat(model, x), x).isfinite()
    for targets in (x[:, 1:], x.T, {"labels": x}):
        with pytest.raises(PlaitError, match=r"J017.*targets are .*the input of lm_head is \(3, 7, 6\)"):
            loss(model(x), targets)


def Gpt_flat(model: nn.Module, x: Tensor) -> Any:
    """Targets for a model that flattens batch and time before its head."""
    out = model(x)
    return HeadOutput(out.hidden.flatten(0, 1), out.head)


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2.0


@pytest.mark.parametrize(
    ("head", "shown"),
    [
        ("lm_heed", "did you mean  lm_head ?"),
        ("", "known: layer, lm_head"),
        ("embed", "embed is a Embedding, not a plain torch.nn.Linear"),
        ("scaled", "scaled is a Scaled, not a plain torch.nn.Linear"),
    ],
)
def test_a_wrong_head_is_named(head: str, shown: str) -> None:
    model = Gpt()
    model.scaled = Scaled(6, 11)
    with pytest.raises(PlaitError, match="J016") as caught:
        LinearCrossEntropy(head).attach(model)
    assert shown in caught.value.problems[0].what


@pytest.mark.parametrize("chunk", [0, -1, True, 2.0])
def test_a_wrong_chunk(chunk: Any) -> None:
    with pytest.raises(PlaitError, match="J016"):
        LinearCrossEntropy(chunk=chunk)


def test_an_engine_trains_and_evaluates_with_it() -> None:
    import jobs

    loss = LinearCrossEntropy(chunk=5)

    def error(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"nll": F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")}

    def data() -> Any:
        return jobs.Tokens(vocabulary=11)

    job = jobs.make(Gpt, data, loss, weight=loss.weight, evaluate=Evaluate(data, error), steps=30)
    with Engine(job, "microbatches=2", place=Place()) as engine:
        before = engine.evaluate()["nll"]
        losses = [engine.step(batch).loss for batch in engine.batches()]
        assert losses[-1] < losses[0]
        assert engine.evaluate()["nll"] < before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Llama", "GPT2", "Qwen3"])
def test_transformers_models_train_with_it_and_a_capped_one_is_refused(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    small |= {"num_key_value_heads": 1, "intermediate_size": 16, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1}
    if name == "GPT2":
        small = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        small |= {"attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}

    def made(name: str) -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**small)
        return getattr(transformers, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")(config).double()

    loss, model, x = LinearCrossEntropy(chunk=3), made(name), torch.randint(0, 50, (2, 8))
    model.train()
    expected = F.cross_entropy(model(input_ids=x, use_cache=False).logits.flatten(0, 1), x.flatten())
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    loss.attach(model)
    actual = loss(model(input_ids=x, use_cache=False), x)
    for a, e in zip(torch.autograd.grad(actual, list(model.parameters())), gradients):
        torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-12)
    if name == "Llama":
        capped = made("Gemma2")
        loss.attach(capped)
        with pytest.raises(PlaitError, match="J017"):
            capped(input_ids=x, use_cache=False)
