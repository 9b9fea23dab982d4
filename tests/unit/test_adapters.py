"""The adapters' results for objects of a script, and their errors, with the reason."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import plait
from plait.integrations.adapters import loaders, loop

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning as L


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def data(count: int = 10) -> TensorDataset:
    return TensorDataset(torch.randn(count, 3), torch.randint(0, 2, (count,)))


def looped(make: Callable[[nn.Module], torch.optim.Optimizer] | None = None, loader: object = None, **more) -> plait.Job:
    net = more.pop("model", None) or model()
    optimizer = make(net) if make else torch.optim.SGD(net.parameters(), 0.1)
    scheduler = more.pop("scheduler", lambda optimizer: None)(optimizer)
    loader = DataLoader(data(), 4, shuffle=True) if loader is None else loader
    return plait.from_loop(net, optimizer, loader, nn.CrossEntropyLoss(), scheduler, **({"epochs": 2} | more))


def test_a_loop_is_read() -> None:
    net = model()
    job = looped(model=net, accumulation=2, world=3, clip=1.0)
    assert (job.batch, job.steps, job.clip, job.order) == (24, 2, 1.0, None)
    one, other = job.model(), job.model()
    assert one is not other and torch.equal(one[0].weight, net[0].weight)
    assert one[0].weight is not net[0].weight
    before = torch.get_rng_state()
    job.model()
    assert torch.equal(before, torch.get_rng_state())


def test_groups_are_found_again_by_place() -> None:
    net = model()
    weights, biases = ([p for p in net.parameters() if (p.ndim > 1) == many] for many in (True, False))
    given = torch.optim.AdamW(
        [{"params": biases, "lr": 0.3, "weight_decay": 0.0}, {"params": weights}], lr=0.1, betas=(0.8, 0.9)
    )
    other = list(model().parameters())
    made = loop.make_optimizer_factory(given, net, "J038")(other)
    assert [[p.ndim for p in g["params"]] for g in made.param_groups] == [[1, 1], [2, 2]]
    assert [(g["lr"], g["weight_decay"], g["betas"]) for g in made.param_groups] == [
        (0.3, 0.0, (0.8, 0.9)),
        (0.1, 0.01, (0.8, 0.9)),
    ]
    assert made.param_groups[0]["params"][0] is other[1]


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=9, cycle_momentum=False),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.StepLR(o, 2)], [3]
        ),
        lambda o: lr_scheduler.LambdaLR(o, [lambda step: 1 / (1 + step)] * 2),
    ],
)
def test_a_scheduler_is_played(make: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]) -> None:
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.2)], lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # OneCycleLR and SequentialLR step before the optimizer
        scheduler = make(optimizer)
        factor, first = (
            loop.make_schedule(scheduler, lambda samples: samples // 4, "J038"),
            optimizer.param_groups[1]["initial_lr"],
        )
        for step in range(8):
            assert factor(4 * step) * first == pytest.approx(optimizer.param_groups[1]["lr"])
            optimizer.step()
            scheduler.step()


def test_steps_of_an_epoch_with_a_short_batch() -> None:
    read = loaders.read_loader(DataLoader(data(), 4), loaders.make_pair_split("J038"), "J038")
    assert [read.make_step_counter(4)(n) for n in (0, 4, 8, 10, 14, 18, 20)] == [0, 1, 2, 3, 4, 5, 6]
    assert list(read.order(0, 0, 3)) == [0, 1, 2]
    whole = loaders.read_loader(DataLoader(data(), 4, shuffle=True, drop_last=True), loaders.make_pair_split("J038"), "J038")
    assert (whole.length, whole.steps_per_epoch(4), len(whole.order(0, 1, 10))) == (8, 2, 8)


def test_labels_that_count() -> None:
    labels = torch.tensor([[5, -100, 3], [-100, -100, 1]])
    assert loop.make_label_counter(True)(labels).tolist() == [1, 1]
    assert loop.make_label_counter(False)(labels).tolist() == [2, 1]


def stepped(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"make": stepped}, "has already taken steps"),
        ({"make": lambda net: torch.optim.SGD(model().parameters(), 0.1)}, "parameters of another model"),
        ({"scheduler": lr_scheduler.ReduceLROnPlateau}, "depends on a metric"),
        ({"scheduler": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2), "make": lambda n: torch.optim.SGD(n.parameters(), 0.1, 0.9)},
         "changes momentum"),
        ({"loader": DataLoader(data(), 4, sampler=WeightedRandomSampler([1.0] * 10, 10))}, "WeightedRandomSampler"),
        ({"loader": data()}, "not a DataLoader"),
        ({"steps": 3}, "are both given"),
        ({"epochs": None}, "the training length is missing"),
    ],
)  # fmt: skip
def test_what_a_loop_may_not_have(given: dict, says: str) -> None:
    with pytest.raises(plait.PlaitError, match=says) as error:
        looped(**given)
    assert error.value.codes == ["J038"] and error.value.problems[0].what


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def lightning(**methods) -> plait.Job:
    return plait.from_lightning(type("Mine", (Module,), methods)(), DataLoader(data(), 4), epochs=1)


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        ({"on_before_optimizer_step": lambda self, optimizer: None}, "overrides on_before_optimizer_step"),
        ({"configure_optimizers": lambda self: [torch.optim.SGD(self.parameters(), 0.1)] * 2}, "returns 2 optimizers"),
        ({"automatic_optimization": False}, "uses manual optimization"),
    ],
)
def test_what_a_lightning_module_may_not_have(methods: dict, says: str) -> None:
    with pytest.raises(plait.PlaitError, match=says) as error:
        lightning(**methods)
    assert error.value.codes == ["J036"]


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (lambda self, batch, batch_idx: 0 if batch_idx % 2 else 1, "uses batch_idx"),
        (lambda self, batch: self.current_epoch, "uses self.current_epoch"),
        (lambda self, batch: self.trainer.datamodule, "self.trainer.datamodule"),
        (lambda self, batch: None, "returned no loss"),
    ],
)
def test_what_a_step_may_not_ask_for(step: Callable, says: str) -> None:
    job = lightning(training_step=step)
    with pytest.raises(plait.PlaitError, match=says) as error:
        job.model()(torch.randn(2, 3))
    assert error.value.codes == ["J036"]


def test_the_module_stays_itself() -> None:
    job = lightning(
        forward=lambda self, x: self.layer(x), validation_step=lambda self, b: self.log("mean", self(b[0]).mean())
    )
    net, x = job.model(), torch.randn(4, 3)
    assert list(net.state_dict()) == ["layer.weight", "layer.bias"] and isinstance(net, Module)
    assert net(batch=(x, torch.zeros(4, dtype=torch.long))).dim() == 0
    assert net(held_out=(x, None))["mean"].shape == (4,)


def trainer(**options) -> L.Trainer:
    return L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1, **options)


def test_what_a_plan_says_is_told_of_a_lightning_trainer() -> None:
    given = (Module(), DataLoader(data(), 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own
        split, plain = trainer(precision="bf16-mixed", devices=2, strategy="ddp_spawn"), trainer()
        part = trainer(limit_train_batches=2)
    with pytest.warns(UserWarning, match='--plan "dp=2 precision=bf16"'):
        plait.from_lightning(*given, trainer=split)
    assert plait.from_lightning(Module(), DataLoader(data(), 4), trainer=plain).steps == 3
    with pytest.raises(plait.PlaitError, match=r"J036.*limit_train_batches=2"):
        plait.from_lightning(Module(), DataLoader(data(), 4), trainer=part)
