"""Compares plait's sliced step with hand-written tensor parallelism: `parallelize_module` with a plan for Llama, and DTensors.

The method is that of overhead.py: all variants run in the same forked processes and take steps in turn. Ratios are of the same
round, with medians and quartiles. It uses gloo, with one thread each. The bytes that a rank sends in one step are counted in
the same way for all variants, including DTensor's own collectives (`sent.py`).

    plait tp=2            Engine.batches() and Engine.step under that plan
    plait tp=2, no sp     the same with sequence_parallel=false
    hand-written          q k v gate up and head by columns, o down by rows, embedding by rows, loss_parallel
    hand-written sp       the same with norms and residuals on sequence shards, as in torch's tutorial: the embedding
                          is reduce-scattered to sequence shards, and gradients of norms are reduced once
"""

import argparse
import json
import mmap
import statistics
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import overhead
import torch
from sent import Sent
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)  # fmt: skip
from torch.utils.data import DataLoader

from plait.config.job import Job
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.model.build_model import make_model

sys.path.insert(0, str(Path(overhead.EXAMPLES / "llama")))
PLANS = {"plait": "tp=2", "plait, no sp": "tp=2 sequence_parallel=false"}


def llama(batch: int, length: int, hidden: int) -> Job:
    import job as example
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=2048, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return overhead.whole_batches(
        Job(
            model=lambda: LlamaForCausalLM(config), loss=example.loss, data=lambda: example.Text(length),
            optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-4, foreach=True), batch=batch, steps=1, clip=1.0, schedule=lambda samples: 1.0,
        )
    )  # fmt: skip


def by_hand(job: Job, place: Place, sequence: bool) -> overhead.Take:
    model = make_model(job)
    mesh = init_device_mesh("cpu", (place.world,))
    stretch, columns = Shard(1), ColwiseParallel
    rows = partial(RowwiseParallel, output_layouts=stretch) if sequence else RowwiseParallel
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(),
            output_layouts=stretch if sequence else Replicate(),
            use_local_output=not sequence,
        ),
        "lm_head": ColwiseParallel(
            input_layouts=stretch if sequence else Replicate(), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    if sequence:
        plan["model.norm"] = SequenceParallel()
        plan["model.layers.0"] = PrepareModuleInput(
            input_layouts=(stretch,), desired_input_layouts=(stretch,), use_local_output=True
        )  # the model's code between them reads the full length from the embedding
    for i in range(len(model.model.layers)):
        own = {f"self_attn.{n}_proj": columns() for n in "qkv"} | {"mlp.gate_proj": columns(), "mlp.up_proj": columns()}
        own |= {"self_attn.o_proj": rows(), "mlp.down_proj": rows()}
        if sequence:
            own |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
        given = stretch if sequence else Replicate()  # gathered once for all columns that read it
        own["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": given}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        )
        own["mlp"] = PrepareModuleInput(input_layouts=(given,), desired_input_layouts=(Replicate(),))
        plan |= {f"model.layers.{i}.{n}": p for n, p in own.items()}
    parallelize_module(model, mesh, plan)
    sliced = [[p for p in model.parameters() if isinstance(p, DTensor) is kind] for kind in (True, False)]
    optimizer = job.optimizer([{"params": part} for part in sliced if part])  # one loop over tensors cannot mix them
    loader = DataLoader(job.data(), job.batch, sampler=overhead.Order(job))
    take = overhead.loop(job, model, optimizer, loader, clip=clip)

    def parallel() -> float:
        with loss_parallel():
            return take()

    return parallel


def clip(parameters: Iterable[nn.Parameter], largest: float) -> None:
    """Clip by the norm of sliced and unsliced parameters together, which torch's own function cannot combine."""
    mine = [p for p in parameters if p.grad is not None]
    for p in mine:  # of a norm on sequence shards: reduced once here, not by every operator that reads it
        if isinstance(p.grad, DTensor) and any(placement.is_partial() for placement in p.grad.placements):
            p.grad = p.grad.redistribute(placements=[Replicate()])
    sliced, whole = [p for p in mine if isinstance(p, DTensor)], [p for p in mine if not isinstance(p, DTensor)]
    squares = [
        nn.utils.get_total_norm([p.grad for p in part if p.grad is not None]) ** 2 for part in (sliced, whole) if part
    ]
    norm = sum(s.full_tensor() if isinstance(s, DTensor) else s for s in squares) ** 0.5
    gradients = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in mine]
    torch._foreach_mul_(gradients, min(1.0, largest / (float(norm) + 1e-6)))


def with_plait(job: Job, place: Place, plan: str) -> overhead.Take:
    engine = Engine(job, Plan.parse(plan), place=place, device="cpu")
    source = engine.batches()
    return lambda: engine.step(next(source)).loss


def measure(place: Place, job: Job, rounds: int, gate: Any) -> dict[str, Any]:
    place.connect(torch.device("cpu"))
    torch.set_num_threads(1)
    takes = {name: with_plait(job, place, plan) for name, plan in PLANS.items()}
    takes |= {"hand-written": by_hand(job, place, False), "hand-written sp": by_hand(job, place, True)}
    losses = [[take() for _ in range(3)] for take in takes.values()]
    sent = []
    for name, take in takes.items():
        counter = Sent(place.world)
        with counter:
            take()
        sent.append([name, counter.calls, counter.bytes, counter.messages])
    seconds = overhead.in_turn(list(takes.values()), rounds, place, gate)
    return {"names": list(takes), "losses": losses, "seconds": seconds.tolist(), "sent": sent}


def show(job: Job, result: dict[str, Any], words: str) -> str:
    times = dict(zip(result["names"], zip(*result["seconds"])))
    hands = [n for n in times if n.startswith("hand")]
    lines = [f"Llama {words} · tp=2 · batch {job.batch} · {len(result['seconds'])} rounds · torch {torch.__version__}"]
    lines.append(f"  {'':<18}{'ms':>8}{'messages':>10}{'MB sent':>9}   " + "".join(f"{'over ' + n:<26}" for n in hands))
    sent = {name: (calls, size) for name, calls, size, _ in result["sent"]}
    for n, row in times.items():
        ratios = [
            statistics.quantiles((a / b for a, b in zip(row, times[other])), n=4) for other in hands if other != n
        ]
        text = "".join(f"{f'{r[1]:.3f} [{r[0]:.3f}, {r[2]:.3f}]':<26}" for r in ratios) if n.startswith("plait") else ""
        calls, size = sent[n]
        lines.append(f"  {n:<18}{statistics.median(row) * 1e3:>8.2f}{calls:>10}{size / 1e6:>9.3f}   {text}".rstrip())
    apart = " ".join(f"{max(c) - min(c):.1e}" for c in zip(*result["losses"]))
    return "\n".join([*lines, f"  losses at most {apart} apart in steps 1, 2, 3"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    job = llama(asked.batch, asked.length, asked.hidden)
    gate = memoryview(mmap.mmap(-1, 64)).cast("q")
    result = fork.run_ranks(lambda place: measure(place, job, asked.rounds, gate), 2)[0]
    words = f"4 × {asked.hidden}, length {asked.length}"
    print(json.dumps(result) if asked.json else show(job, result, words))
    return 0


if __name__ == "__main__":
    sys.exit(main())
