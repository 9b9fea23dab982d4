"""`plait.from_keras`: convert a compiled Keras 3 model on the torch backend to a job.

A Keras layer reads its own variables and not the attributes of a module, so a plan could not replace them. Keras also has a call that is a
function of the variables (`stateless_call`). The job's model has these variables as parameters, under their Keras paths, and calls it.
Keras layers compute in one dtype, so there is a second model of the same layers for float64. All parameters belong to one unit. So dp and
fsdp apply to such a job, and tp and pp find nothing to split.
"""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from plait import Job, PlaitError
from plait.config.errors import Problem, summarize_error

if TYPE_CHECKING:
    import keras

CODE = "J039"
EPSILON = 1e-7
"""`keras.config.epsilon()`: minimum distance of probabilities from 0 and 1."""
UNSUPPORTED_SETTINGS = ("clipnorm", "clipvalue", "use_ema", "gradient_accumulation_steps", "loss_scale_factor")
"""Settings of Keras optimizers that a job does not support."""
Loss = Callable[[Tensor, Tensor], Tensor]


def from_keras(
    model: "keras.Model", x: object, y: object, *, batch: int = 32, epochs: int | None = None, steps: int | None = None, seed: int = 0
) -> Job:  # fmt: skip
    """Convert `model.fit(x, y, batch_size=batch, epochs=epochs)` to a job; the model is compiled with an optimizer and a loss.

    x, y: arrays or tensors of shape [samples, …]. batch: global batch size. Optimizers: SGD, Adam and AdamW, and `global_clipnorm`. torch adds
    epsilon after the bias correction, and Keras before it. Losses: mean squared and absolute error, binary, categorical and sparse categorical
    cross-entropy. Raises `PlaitError` J039 for others, for another backend, and for layers with random numbers or state in their forward pass
    (Dropout, BatchNormalization).
    """
    import keras

    if keras.backend.backend() != "torch":
        fix = ('os.environ["KERAS_BACKEND"] = "torch"    before keras is imported',)
        raise PlaitError(Problem(CODE, f"Keras runs on {keras.backend.backend()}, not on torch", fix=fix))
    if not getattr(model, "compiled", False):
        raise PlaitError(Problem(CODE, "the model is not compiled", fix=("model.compile(optimizer=…, loss=…)",)))
    _reject_state(model)
    twins = {torch.float32: _HiddenModel(_clone_in_dtype(model, "float32")), torch.float64: _HiddenModel(_clone_in_dtype(model, "float64"))}
    weights = {v.path: torch.as_tensor(v.numpy()) for v in model.trainable_variables}
    fixed = [torch.as_tensor(v.numpy()) for v in model.non_trainable_variables]
    samples = TensorDataset(torch.as_tensor(x), torch.as_tensor(y))
    if (steps is None) == (epochs is None):
        raise PlaitError(Problem(CODE, "exactly one of steps and epochs must be given", fix=("steps=N", "epochs=N")))
    make, clip = _convert_optimizer(type(model.optimizer).__name__, model.optimizer.get_config())
    return Job(
        model=lambda: KerasCall(weights, fixed, twins), loss=_convert_loss(model.loss), data=lambda: samples, optimizer=make, batch=batch,
        steps=steps or (epochs or 0) * -(-len(samples) // batch), clip=clip, seed=seed,
    )  # fmt: skip


class _HiddenModel:
    """A Keras model hidden from torch, which would register its variables as parameters. A copy is the same object."""

    def __init__(self, model: "keras.Model"):
        self.model = model

    def __deepcopy__(self, memo: dict[int, object]) -> "_HiddenModel":
        return self


class KerasCall(nn.Module):
    """A Keras model as a function of its variables, which are this module's parameters."""

    def __init__(self, weights: dict[str, Tensor], fixed: list[Tensor], twins: dict[torch.dtype, _HiddenModel]):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(t.clone()) for t in weights.values()])
        self.names, self.twins = list(weights), twins
        for number, value in enumerate(fixed):
            self.register_buffer(f"fixed{number}", value.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Compute the outputs for x of shape [samples, …]."""
        weights = list(self.weights)
        hidden = self.twins[torch.float64 if weights[0].dtype == torch.float64 else torch.float32]
        outputs, _ = hidden.model.stateless_call(weights, list(self.buffers()), x, training=True)
        return outputs


def _reject_state(model: "keras.Model") -> None:
    """Raise J039 for layers whose forward pass changes their state."""
    for layer in model.layers:
        counts = [v.path for v in layer.non_trainable_variables] if layer.trainable else []
        if counts:
            what = f"the layer {layer.name} ({type(layer).__name__}) draws random numbers or counts in its forward pass"
            why = f"it keeps {counts[0]} in addition to its weights, which plait cannot seed or reduce over ranks"
            raise PlaitError(Problem(CODE, what, why=why, fix=("remove the layer", "write the model in torch: nn.Dropout")))


def _clone_in_dtype(model: "keras.Model", dtype: str) -> "keras.Model":
    """Build a model of the same layers that computes in another dtype."""
    import keras

    try:
        text = json.loads(model.to_json().replace('"float32"', f'"{dtype}"'))
        text.pop("compile_config", None)
        return keras.models.model_from_json(json.dumps(text))
    except Exception as error:  # a user's class may raise anything
        what = f"the {type(model).__name__} cannot be rebuilt from its own configuration: {summarize_error(error)}"
        fix = ("a Sequential or functional model of Keras' layers",)
        raise PlaitError(Problem(CODE, what, fix=fix)) from error


def _convert_optimizer(
    kind: str, config: dict[str, Any]
) -> tuple[Callable[[list[nn.Parameter]], torch.optim.Optimizer], float | None]:
    """Return torch's optimizer with the same settings, and the clipping norm."""
    rate, decay = config["learning_rate"], config.get("weight_decay") or 0.0
    moved = [key for key in UNSUPPORTED_SETTINGS if config.get(key)]
    if moved or not isinstance(rate, float):
        what = f"the optimizer's {moved[0] if moved else 'learning_rate, a schedule,'} is not supported by a job"
        raise PlaitError(Problem(CODE, what, fix=("a number as learning_rate, global_clipnorm, and Job.schedule",)))
    clip = config.get("global_clipnorm")
    if kind == "SGD" and not decay:
        momentum, nesterov = config["momentum"], config["nesterov"]
        return lambda parameters: torch.optim.SGD(parameters, rate, momentum=momentum, nesterov=nesterov), clip
    if kind in ("Adam", "AdamW"):
        more = {"betas": (config["beta_1"], config["beta_2"]), "eps": config["epsilon"], "amsgrad": config["amsgrad"]}
        return lambda parameters: torch.optim.AdamW(parameters, rate, weight_decay=decay, **more), clip
    what, fix = f"the optimizer {kind} has no equivalent in torch", ("SGD, Adam or AdamW", "Job.optimizer")
    raise PlaitError(Problem(CODE, what, fix=fix))


def _convert_loss(loss: object) -> Loss:
    """Return the loss that a Keras model was compiled with, as a mean over samples: from a name, a function or an object."""
    import keras

    found = keras.losses.get(loss)
    config = (
        found.get_config() if isinstance(found, keras.losses.Loss) else {"name": getattr(found, "__name__", str(found))}
    )
    known: dict[str, Loss] = {
        "mean_squared_error": lambda out, y: F.mse_loss(out, y.to(out.dtype)),
        "mean_absolute_error": lambda out, y: F.l1_loss(out, y.to(out.dtype)),
    }
    logits = bool(config.get("from_logits"))
    known |= {
        "sparse_categorical_crossentropy": lambda out, y: F.nll_loss(_log_probabilities(out, logits), y.flatten().long()),
        "categorical_crossentropy": lambda out, y: -(_log_probabilities(out, logits) * y.to(out.dtype)).sum(-1).mean(),
        "binary_crossentropy": lambda out, y: _binary_cross_entropy(out, y.to(out.dtype), logits),
    }
    odd = config.get("label_smoothing") or config.get("ignore_class") is not None
    plain = config.get("reduction", "sum_over_batch_size") == "sum_over_batch_size" and not odd
    if config["name"] not in known or not plain:
        what = f"the loss {config['name']} has no equivalent in torch, or has settings without one"
        raise PlaitError(
            Problem(CODE, what, fix=("dataclasses.replace(job, loss=…)    a function of outputs and targets",))
        )
    return known[config["name"]]


def _log_probabilities(out: Tensor, logits: bool) -> Tensor:
    """Return log-probabilities of classes, of shape [samples, classes]."""
    if logits:
        return out.log_softmax(-1)
    return (out / out.sum(-1, keepdim=True)).clamp(EPSILON, 1 - EPSILON).log()


def _binary_cross_entropy(out: Tensor, y: Tensor, logits: bool) -> Tensor:
    if logits:
        return F.binary_cross_entropy_with_logits(out, y)
    return F.binary_cross_entropy(out.clamp(EPSILON, 1 - EPSILON), y)
