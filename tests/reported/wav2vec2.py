# transformers: wav2vec2 with CTC, spec augment by numpy, layer drop, weight norm, group norm

import torch
import torch.nn.functional as F
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

import plait

C = Wav2Vec2Config(
    vocab_size=12,
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=32,
    conv_dim=(8, 8),
    conv_stride=(4, 4),
    conv_kernel=(8, 4),
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=8,
    num_conv_pos_embedding_groups=2,
    mask_time_prob=0.2,
    mask_time_length=2,
    layerdrop=0.2,
    hidden_dropout=0.1,
    pad_token_id=0,
)


class Speech:
    def __len__(self):
        return 60

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return torch.randn(400, generator=g), torch.randint(1, 12, (4,), generator=g)


def loss(o, y):
    lp = o.logits.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(lp, y, torch.full((len(y),), len(lp)), torch.full((len(y),), 4), zero_infinity=True)


def job(drop: float = 0.2, mask: float = 0.2):
    def model():
        C.layerdrop, C.mask_time_prob = drop, mask
        return Wav2Vec2ForCTC(C)

    return plait.Job(
        model=model, loss=loss, data=Speech, optimizer=lambda p: torch.optim.AdamW(p, 1e-4), batch=8, steps=10, clip=1.0
    )
