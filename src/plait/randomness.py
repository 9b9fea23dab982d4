"""Randomness that does not know the layout: keyed by (seed, step, place in the model, global element index).

A framework that draws a dropout mask from a per-rank generator trains another model on two devices than on one.
Here every random number of the forward pass is a pure function of

    seed · step · place (module name, which call of it, which draw in it) · index of the element in the GLOBAL tensor

so a rank that holds samples 32 to 63 of the batch draws exactly the stretch of the mask that one device would have
drawn there. The generator is Philox (counter-based: any stretch costs what it is long, Salmon et al. 2011), which
numpy runs several times faster than torch draws a mask. Elements are indexed with the batch dim moved to the front;
which dim that is, `sketch.py` finds by running the model on two batch sizes. A draw that has no batch dim (a mask on
a weight, a layer drop) is the same everywhere.

Python's, numpy's and torch's own generators are seeded by (seed, step) before each forward pass, so that host-side
decisions (``if random.random() < 0.1``) agree on all ranks and after a resume. The same rule keys data augmentation
by (seed, epoch, sample).
"""

import hashlib
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random import Philox
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from plait.torchseam import SEEDED, mask_op

PLAIN_DROPOUTS = (F.dropout, torch.dropout)
FEATURE_DROPOUTS = (F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout)
COMPOSITES = frozenset({
    F.alpha_dropout, F.feature_alpha_dropout, torch.alpha_dropout, torch.feature_alpha_dropout, F.rrelu, torch.rrelu,
    F.scaled_dot_product_attention, F.multi_head_attention_forward, F.gumbel_softmax, F.fractional_max_pool2d,
    torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu, torch.native_dropout, torch.bernoulli, torch.normal,
    torch.rand, torch.rand_like, torch.randn, torch.randn_like, torch.randint, torch.randint_like, torch.randperm,
    torch.multinomial, torch.poisson, torch.binomial, torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh,
    torch._VF.rnn_relu, Tensor.bernoulli, Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.exponential_,
    Tensor.random_, Tensor.geometric_, Tensor.cauchy_, Tensor.log_normal_, Tensor.multinomial,
})  # fmt: skip
"""Functions that may draw inside; each is run under `_Drawn`, which sees the draws themselves."""


def key(*words: Any) -> int:
    """A 128-bit Philox key of the words: the same on every machine and in every version."""
    return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=16).digest(), "little")


def bits(philox_key: int, start: int, count: int) -> np.ndarray:
    """Elements start … start + count − 1 of the stream of that key, as uint32."""
    block, skip = divmod(start, 8)  # one Philox counter yields four 64-bit words, eight elements
    raw = Philox(key=philox_key, counter=block).random_raw((skip + count + 1) // 2)
    return raw.view(np.uint32)[skip : skip + count]


def seed_host(*words: Any) -> None:
    """Seed Python's, numpy's and torch's CPU generators by the words."""
    number = key(*words)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(number & 0x7FFFFFFFFFFFFFFF)


def host_state() -> tuple[Any, Any, Tensor]:
    """The state of Python's, numpy's and torch's generators, for `restore_host`."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def restore_host(state: tuple[Any, Any, Tensor]) -> None:
    """Put the host generators back."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def host_fingerprint() -> tuple[int, int, int]:
    """Changes, generator by generator (Python, numpy, torch), whenever one was drawn from. Takes some 50 µs."""
    python, numpy, torch_state = host_state()
    return hash(python), hash((numpy[2], numpy[1].tobytes())), hash(torch_state.numpy().tobytes())


def permutation(seed: int, epoch: int, length: int) -> np.ndarray:
    """The sample order of an epoch: a pure function of (seed, epoch), of shape [length]."""
    return np.argsort(Philox(key=key(seed, "order", epoch)).random_raw(length), kind="stable")


class Randomness:
    """Gives a model its layout-free random numbers.

    `places` maps a place to the batch dim of the tensor drawn there (None: no batch dim); it comes from the sketch.
    A model without places pays only for seeding the host generators.
    """

    def __init__(self, model: nn.Module, seed: int, places: dict[str, int | None]):
        self.seed, self.places = seed, places
        self.where = torch.zeros(4, dtype=torch.int64)  # seed, step, first sample, samples
        self._mode = _Keyed(self)
        self._owner: list[str] = []
        self._calls: dict[str, int] = {}
        owners = {place.split("#")[0] for place in places}
        for name, module in model.named_modules():
            if name in owners:
                module.register_forward_pre_hook(self._enter(name), prepend=True)
                module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, name: str):
        def enter(module: nn.Module, args: Any) -> None:
            self._calls[name] = self._calls.get(name, 0) + 1
            self._owner.append(f"{name}#{self._calls[name]}")

        return enter

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._owner.pop()

    def place(self) -> str:
        """The place of the next draw: `module#call#draw`."""
        owner = self._owner[-1] if self._owner else "#0"
        self._calls[owner] = self._calls.get(owner, 0) + 1
        return f"{owner}#{self._calls[owner]}"

    @contextmanager
    def at(self, step: int, first: int, count: int) -> Iterator[None]:
        """Random numbers of the samples first … first + count − 1 of the global batch of `step`."""
        seed_host(self.seed, "forward", step)
        if not self.places:
            yield
            return
        self.where[0], self.where[1], self.where[2], self.where[3] = self.seed, step, first, count
        self._calls.clear()
        self._owner.clear()
        with self._mode:
            yield

    def keep(self, x: Tensor, p: float, shape: torch.Size | None = None) -> Tensor:
        """A dropout mask like `x` (or of `shape`, to be broadcast): 1 / (1 − p) with probability 1 − p, else 0."""
        place = self.place()
        like = x if shape is None else x.new_empty(shape)
        return mask_op(like.detach(), self.where, place, self.places.get(place, -1), p)


class _Keyed(TorchFunctionMode):
    """Replaces the random functions of a forward pass by keyed ones. Traced by torch.compile without a break."""

    def __init__(self, randomness: Randomness):
        super().__init__()
        self.randomness = randomness

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in PLAIN_DROPOUTS or func in FEATURE_DROPOUTS:
            return self._dropout(func, *args, **kwargs)
        if func in COMPOSITES and not torch.compiler.is_compiling():
            with _Drawn(self.randomness):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(
        self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
    ):
        if not (training and train) or p == 0.0:
            return input
        shape = None
        if func in FEATURE_DROPOUTS:
            unbatched = (func is F.dropout1d and input.dim() == 2) or (func is F.dropout3d and input.dim() == 4)
            shape = input.shape[: 1 if unbatched else 2] + (1,) * (input.dim() - (1 if unbatched else 2))
        mask = self.randomness.keep(input, p, shape)
        return input.mul_(mask) if inplace else input * mask


class _Drawn(TorchDispatchMode):
    """Inside a composite random function: the draws themselves, at the level of torch's operators."""

    def __init__(self, randomness: Randomness):
        super().__init__()
        self.randomness = randomness

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func not in SEEDED:
            return result
        name = func.overloadpacket.__name__.rstrip("_").removesuffix("_like")
        rule = _RULES.get(name)
        if rule is None:
            return result
        place = self.randomness.place()
        where = self.randomness.where.tolist()
        uniform = _uniform(result, where, place, self.randomness.places.get(place, -1))
        return result.copy_(rule(uniform, *_numbers(name, func, args, kwargs or {})))


def drawn_in_composites(places: Iterable[str], model: nn.Module) -> list[str]:
    """Modules whose draws happen inside a composite function rather than a dropout: torch.compile cannot key these."""
    dropouts = (nn.modules.dropout._DropoutNd,)
    owners = dict.fromkeys(place.split("#")[0] for place in places)
    return [name for name in owners if not isinstance(model.get_submodule(name), dropouts)]


def _uniform(like: Tensor, where: list[int], place: str, dim: int | None) -> Tensor:
    """float64 in the open interval (0, 1), keyed by global element, of the shape of `like`."""
    return torch.from_numpy((_stretch(like.shape, where, place, dim) + 0.5) * 2.0**-32).to(like.device)


def _stretch(shape: torch.Size, where: list[int], place: str, dim: int | None) -> np.ndarray:
    """The stretch of the place's global stream that belongs to this rank's samples, as uint32 of `shape`."""
    seed, step, first, samples = where
    if dim == -1:  # a place the sketch did not see (a branch taken for the first time)
        dim = next((d for d, n in enumerate(shape) if n == samples), None)
    count = int(np.prod(shape, dtype=np.int64))
    if dim is None or samples == 0:
        return bits(key(seed, "draw", step, place), 0, count).reshape(tuple(shape))
    per_sample = count // samples
    drawn = bits(key(seed, "draw", step, place), first * per_sample, count)
    front = (shape[dim], *shape[:dim], *shape[dim + 1 :])
    return np.moveaxis(drawn.reshape(front), 0, dim)


def draw_mask(x: Tensor, where: Tensor, place: str, dim: int | None, p: float) -> Tensor:
    """The dropout mask behind `Randomness.keep`: what the operator `plait::mask` computes."""
    drawn = _stretch(x.shape, where.tolist(), place, dim)
    keep = drawn >= np.uint32(min(round(p * 2**32), 2**32 - 1))
    mask = torch.from_numpy(np.ascontiguousarray(keep)).to(x.device, x.dtype)
    return mask.mul_(1.0 / (1.0 - p)) if p < 1.0 else mask.zero_()


def _bernoulli(u: Tensor, p: Any = 0.5) -> Tensor:
    return u < p


def _normal(u: Tensor, mean: Any = 0.0, std: Any = 1.0) -> Tensor:
    return torch.special.ndtri(u) * std + mean


def _integers(u: Tensor, low: int = 0, high: int = 2**24) -> Tensor:
    return torch.floor(u * (high - low)) + low


_RULES = {
    "bernoulli": _bernoulli,
    "rand": lambda u, low=0.0, high=1.0: low + u * (high - low),
    "uniform": lambda u, low=0.0, high=1.0: low + u * (high - low),
    "randn": _normal,
    "normal": _normal,
    "exponential": lambda u, rate=1.0: -torch.log(u) / rate,
    "randint": _integers,
    "random": _integers,
    "cauchy": lambda u, median=0.0, sigma=1.0: median + sigma * torch.tan(torch.pi * (u - 0.5)),
    "log_normal": lambda u, mean=1.0, std=2.0: torch.exp(_normal(u, mean, std)),
    "geometric": lambda u, p=0.5: torch.ceil(torch.log(u) / np.log1p(-p)),
}
"""Operator name -> (uniform numbers, the operator's own numbers) -> what it draws."""


def _numbers(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The distribution's own numbers among an operator's arguments."""
    if name in ("rand", "randn"):
        return []
    if name == "randint":
        low_high = [a for a in args if isinstance(a, int)]
        return low_high if len(low_high) == 2 else [0, *low_high]
    if name == "bernoulli" and func.overloadpacket.__name__ == "bernoulli" and len(args) == 1:
        return [args[0]]
    numbers = [a for a in args[1:] if isinstance(a, (int, float, Tensor))]
    if (
        name == "normal"
        and isinstance(args[0], (int, float, Tensor))
        and not func.overloadpacket.__name__.endswith("_")
    ):
        numbers = [a for a in args if isinstance(a, (int, float, Tensor))]
    if name == "random" and len(numbers) == 1:
        numbers = [0, *numbers]
    return numbers + [
        v for k, v in kwargs.items() if k in ("p", "mean", "std", "from", "to", "lambd", "median", "sigma")
    ]
