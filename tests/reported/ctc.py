# speech: conv + BiLSTM with packed sequences, CTC loss averaged over the targets of each sample
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import plait


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(6, 16, 3, padding=1)
        self.rnn = nn.LSTM(16, 16, 2, batch_first=True, bidirectional=True, dropout=P)
        self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, 9)

    def forward(self, x, n):
        h = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        h, _ = self.rnn(pack_padded_sequence(h, n.cpu(), batch_first=True, enforce_sorted=False))
        h, _ = pad_packed_sequence(h, batch_first=True)
        return self.out(self.norm(h)).log_softmax(-1)


class Speech:
    def __len__(self):
        return 80

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        t = int(torch.randint(8, 20, (), generator=g))
        k = int(torch.randint(1, 7, (), generator=g))
        return torch.randn(t, 6, generator=g), torch.randint(1, 9, (k,), generator=g)

    def collate(self, ss):
        xs, ys = zip(*ss)
        n = torch.tensor([len(x) for x in xs])
        return (pad_sequence(xs, batch_first=True), n), (
            pad_sequence(ys, batch_first=True),
            n,
            torch.tensor([len(y) for y in ys]),
        )


def loss(lp, y):
    t, n, k = y
    return F.ctc_loss(lp.transpose(0, 1), t, n, k, zero_infinity=True)


P = 0.1


def job(p: float = 0.1):
    global P
    P = p
    return plait.Job(
        model=Net,
        loss=loss,
        weight=lambda y: len(y[1]),
        data=Speech,
        optimizer=lambda p: torch.optim.Adam(p, 1e-3),
        batch=8,
        steps=12,
        clip=5.0,
    )
