"""Data sets of many kinds, for the tests of data and evaluation."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info


class Plain:
    """Sample i is (input [2], i). `where` shows which loader worker made it."""

    def __init__(self, length: int = 10):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Any:
        info = get_worker_info()
        return torch.tensor([float(i), -1.0 if info is None else info.id]), torch.tensor(i)


class Augmented(Plain):
    """Draws from one or all of the host generators."""

    def __init__(self, length: int, kind: str):
        super().__init__(length)
        self.kind = kind

    def __getitem__(self, i: int) -> Any:
        draws = {
            "torch": lambda: torch.randn(2),
            "numpy": lambda: torch.from_numpy(np.random.rand(2)),
            "python": lambda: torch.tensor(random.random()),
        }
        drawn = [draw().flatten()[:1].double() for name, draw in draws.items() if self.kind in (name, "all")]
        return torch.cat(drawn), torch.tensor(i)


class Stream:
    """An iterable. `noisy` adds random numbers of all host generators."""

    def __init__(self, length: int = 10, noisy: bool = False):
        self.length, self.noisy, self.next, self.epochs = length, noisy, 0, []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self):
        for i in range(self.length):
            yield self.sample(i)

    def sample(self, i: int) -> tuple[Tensor, Tensor]:
        noise = float(torch.rand(())) + np.random.rand() + random.random() if self.noisy else 0.0
        return torch.tensor([i + noise]), torch.tensor(i)


class Stateful(Stream):
    """The same with a state."""

    def __iter__(self):
        while self.next < self.length:
            self.next += 1
            yield self.sample(self.next - 1)
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Trees(Plain):
    """Inputs that are a dict or a tuple, targets that are a tuple."""

    def __init__(self, kind: str):
        super().__init__(5)
        self.kind = kind

    def __getitem__(self, i: int) -> Any:
        x, mask = torch.full((3,), float(i)), torch.ones(3, dtype=torch.bool)
        return ({"x": x, "mask": mask} if self.kind == "dict" else (x, mask)), (torch.tensor(i), float(i))


class Padded(Plain):
    """Ragged samples, with the data set's own collate function."""

    def __getitem__(self, i: int) -> Tensor:
        return torch.arange(1, i + 2)

    def collate(self, samples: list[Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        padded = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
        return {"tokens": padded}, torch.tensor([len(s) for s in samples])


class Torch(IterableDataset):
    """torch's base class has a __getitem__ that raises."""

    def __iter__(self):
        for i in range(10):
            yield torch.tensor([float(i)]), torch.tensor(i)


class Sized(Torch):
    def __len__(self) -> int:
        return 10
