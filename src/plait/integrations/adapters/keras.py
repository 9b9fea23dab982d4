"""`plait.from_keras`: a compiled Keras 3 model on the torch backend as a job.

A Keras layer reads its own variables and not the attributes of a module, so a plan could not give it other ones. Keras has a call
that is a function of the variables (`stateless_call`); the job's model holds them as parameters, by their Keras paths, and calls it.
Its layers compute in one number format, so there is a second model of the same layers for float64. The parameters are all of one
unit: dp and fsdp split such a job, and tp and pp find nothing to cut.
"""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from plait import Job, PlaitError
from plait.config.errors import Problem, in_a_line

if TYPE_CHECKING:
    import keras

CODE = "J039"
SMALLEST = 1e-7
"""`keras.config.epsilon()`: probabilities are kept away from 0 and 1 by so much."""
PLAIN = ("clipnorm", "clipvalue", "use_ema", "gradient_accumulation_steps", "loss_scale_factor")
"""Settings of any Keras optimizer that a job's has not."""
Loss = Callable[[Tensor, Tensor], Tensor]


def from_keras(
    model: "keras.Model", x: object, y: object, *, batch: int = 32, epochs: int | None = None, steps: int | None = None, seed: int = 0
) -> Job:  # fmt: skip
    """The job that `model.fit(x, y, batch_size=batch, epochs=epochs)` is; the model is compiled with an optimizer and a loss.

    x, y: arrays or tensors of shape [samples, …]. batch: over all devices. Optimizers: SGD, Adam and AdamW, whose epsilon torch adds
    after the bias correction and Keras before, and `global_clipnorm`. Losses: mean squared and absolute error, binary, categorical
    and sparse categorical cross-entropy. Raises `PlaitError` J039 for others, for layers that draw random numbers or count in
    their forward pass (Dropout, BatchNormalization), and for another backend.
    """
    import keras

    if keras.backend.backend() != "torch":
        fix = ('os.environ["KERAS_BACKEND"] = "torch"    before keras is imported',)
        raise PlaitError(Problem(CODE, f"Keras runs on {keras.backend.backend()}, not on torch", fix=fix))
    if not getattr(model, "compiled", False):
        raise PlaitError(Problem(CODE, "the model is not compiled", fix=("model.compile(optimizer=…, loss=…)",)))
    _refuse_state(model)
    twins = {torch.float32: _Hidden(_twin(model, "float32")), torch.float64: _Hidden(_twin(model, "float64"))}
    weights = {v.path: torch.as_tensor(v.numpy()) for v in model.trainable_variables}
    fixed = [torch.as_tensor(v.numpy()) for v in model.non_trainable_variables]
    samples = TensorDataset(torch.as_tensor(x), torch.as_tensor(y))
    if (steps is None) == (epochs is None):
        raise PlaitError(Problem(CODE, "one of steps and epochs says how long to train", fix=("steps=N", "epochs=N")))
    make, clip = _optimizer(type(model.optimizer).__name__, model.optimizer.get_config())
    return Job(
        model=lambda: KerasCall(weights, fixed, twins), loss=_loss(model.loss), data=lambda: samples, optimizer=make, batch=batch,
        steps=steps or (epochs or 0) * -(-len(samples) // batch), clip=clip, seed=seed,
    )  # fmt: skip


class _Hidden:
    """A Keras model out of sight of torch, which would take its variables for parameters. A copy is the same one."""

    def __init__(self, model: "keras.Model"):
        self.model = model

    def __deepcopy__(self, memo: dict[int, object]) -> "_Hidden":
        return self


class KerasCall(nn.Module):
    """A Keras model as a function of its variables, which are this module's parameters."""

    def __init__(self, weights: dict[str, Tensor], fixed: list[Tensor], twins: dict[torch.dtype, _Hidden]):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(t.clone()) for t in weights.values()])
        self.names, self.twins = list(weights), twins
        for number, value in enumerate(fixed):
            self.register_buffer(f"fixed{number}", value.clone())

    def forward(self, x: Tensor) -> Tensor:
        """The model's outputs for x of shape [samples, …]."""
        weights = list(self.weights)
        hidden = self.twins[torch.float64 if weights[0].dtype == torch.float64 else torch.float32]
        outputs, _ = hidden.model.stateless_call(weights, list(self.buffers()), x, training=True)
        return outputs


def _refuse_state(model: "keras.Model") -> None:
    """J039 of layers whose forward pass changes what they keep."""
    for layer in model.layers:
        counts = [v.path for v in layer.non_trainable_variables] if layer.trainable else []
        if counts:
            what = f"the layer {layer.name} ({type(layer).__name__}) draws random numbers or counts in its forward pass"
            why = f"it keeps {counts[0]} beside its weights, in a way that plait cannot key or sum over ranks"
            raise PlaitError(Problem(CODE, what, why=why, fix=("leave it out", "write the model in torch: nn.Dropout")))


def _twin(model: "keras.Model", dtype: str) -> "keras.Model":
    """A model of the same layers that computes in another number format."""
    import keras

    try:
        text = json.loads(model.to_json().replace('"float32"', f'"{dtype}"'))
        text.pop("compile_config", None)
        return keras.models.model_from_json(json.dumps(text))
    except Exception as error:  # a class of one's own raises anything
        what = f"the {type(model).__name__} cannot be made again from its own description: {in_a_line(error)}"
        fix = ("a Sequential or functional model of Keras' layers",)
        raise PlaitError(Problem(CODE, what, fix=fix)) from error


def _optimizer(
    kind: str, config: dict[str, Any]
) -> tuple[Callable[[list[nn.Parameter]], torch.optim.Optimizer], float | None]:
    """torch's optimizer of the same settings, and the norm to clip at."""
    rate, decay = config["learning_rate"], config.get("weight_decay") or 0.0
    moved = [key for key in PLAIN if config.get(key)]
    if moved or not isinstance(rate, float):
        what = f"the optimizer's {moved[0] if moved else 'learning_rate, a schedule,'} has no place in a job"
        raise PlaitError(Problem(CODE, what, fix=("a number as learning_rate, global_clipnorm, and Job.schedule",)))
    clip = config.get("global_clipnorm")
    if kind == "SGD" and not decay:
        momentum, nesterov = config["momentum"], config["nesterov"]
        return lambda parameters: torch.optim.SGD(parameters, rate, momentum=momentum, nesterov=nesterov), clip
    if kind in ("Adam", "AdamW"):
        more = {"betas": (config["beta_1"], config["beta_2"]), "eps": config["epsilon"], "amsgrad": config["amsgrad"]}
        return lambda parameters: torch.optim.AdamW(parameters, rate, weight_decay=decay, **more), clip
    what, fix = f"the optimizer {kind} is not known to be torch's", ("SGD, Adam or AdamW", "Job.optimizer")
    raise PlaitError(Problem(CODE, what, fix=fix))


def _loss(given: object) -> Loss:
    """The mean over samples of the loss that a Keras model was compiled with: a name, a function or an object."""
    import keras

    found = keras.losses.get(given)
    config = (
        found.get_config() if isinstance(found, keras.losses.Loss) else {"name": getattr(found, "__name__", str(found))}
    )
    known: dict[str, Loss] = {
        "mean_squared_error": lambda out, y: F.mse_loss(out, y.to(out.dtype)),
        "mean_absolute_error": lambda out, y: F.l1_loss(out, y.to(out.dtype)),
    }
    logits = bool(config.get("from_logits"))
    known |= {
        "sparse_categorical_crossentropy": lambda out, y: F.nll_loss(_logs(out, logits), y.flatten().long()),
        "categorical_crossentropy": lambda out, y: -(_logs(out, logits) * y.to(out.dtype)).sum(-1).mean(),
        "binary_crossentropy": lambda out, y: _binary(out, y.to(out.dtype), logits),
    }
    odd = config.get("label_smoothing") or config.get("ignore_class") is not None
    plain = config.get("reduction", "sum_over_batch_size") == "sum_over_batch_size" and not odd
    if config["name"] not in known or not plain:
        what = f"the loss {config['name']} is not known to be torch's, or has settings that are not"
        raise PlaitError(
            Problem(CODE, what, fix=("dataclasses.replace(job, loss=…)    a function of outputs and targets",))
        )
    return known[config["name"]]


def _logs(out: Tensor, logits: bool) -> Tensor:
    """Logarithms of the probabilities of classes, of shape [samples, classes]."""
    if logits:
        return out.log_softmax(-1)
    return (out / out.sum(-1, keepdim=True)).clamp(SMALLEST, 1 - SMALLEST).log()


def _binary(out: Tensor, y: Tensor, logits: bool) -> Tensor:
    if logits:
        return F.binary_cross_entropy_with_logits(out, y)
    return F.binary_cross_entropy(out.clamp(SMALLEST, 1 - SMALLEST), y)
