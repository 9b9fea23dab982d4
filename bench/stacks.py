"""Facts of software stacks about a training step, each with its source, selected by a row's text about its stack.

A row belongs to the first stack of `STACKS` whose words are in its source, its table, its note or its format. A fact applies to
every row of a stack, never to one row or one source; without a known fact, `DEFAULT` applies. A report on unseen facts leaves out
the stacks whose rows come only from the predicted sources.
"""

import re
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal

Kernels = Literal["unfused", "earlier", "portable", "tuned"]
"""Kernels of attention: none, or a generation of `formulas.Attention`."""
BYTES = {
    "wide": (4.0, 4.0, 8.0, 4.0), "fsdp2": (4.0, 4.0, 8.0, 2.0), "megatron": (2.0, 4.0, 12.0, 2.0), "nemo": (2.0, 2.0, 12.0, 2.0),
    "zero": (2.0, 2.0, 20.0, 2.0), "alone": (2.0, 2.0, 16.0, 2.0), "pure": (2.0, 2.0, 4.0, 2.0), "four": (0.55, 2.0, 4.0, 2.0),
}  # fmt: skip
"""Bytes of an element of weights, gradients, optimizer state and messages.

`wide`: 32-bit training, and autocast. `fsdp2`: weights are cast to 16 bits for their gathers. `megatron`: 16-bit weights, 32-bit sums of
gradients, 32-bit weights and two moments; `nemo`: 16-bit sums. `zero`: 16-bit weights and gradients; its shards
have 32-bit weights, two moments and two buffers of gradients. `alone`: one buffer, because no other rank exists. `pure`: all in 16 bits. `four`:
frozen
weights in 4 bits, with scales of blocks (QLoRA, arXiv 2305.14314).
"""


@dataclass(frozen=True)
class Stack:
    """A stack. The defaults are plain torch: DDP and FSDP overlap, SDPA is FlashAttention-2."""

    name: str
    words: str
    source: str
    attention: Kernels = "portable"
    portable: bool = True
    """Whether kernels are torch's own, not the vendor's for the device."""
    overlapped: bool = True
    """Whether messages of gradients and weights overlap with computation."""
    held: str = "fsdp2"
    """A key of `BYTES`."""
    adds: bool = True
    """Whether a separate operator adds the gradients of micro-batches up; False with Megatron-LM's --gradient-accumulation-fusion."""
    tiled: bool = False
    """Whether messages of tp are sent tile by tile during matmuls."""
    once: bool = True
    """Whether weights are gathered once a step under pp (torchtitan's docs/fsdp.md)."""
    piece: float = inf
    """The maximum number of weight elements in one gather."""
    fused_loss: bool = False
    """Whether the loss keeps no 32-bit logits."""
    channels_last: bool = False
    fuses: bool = False
    """Whether pointwise operators are fused, compiled or by hand."""
    launches: float = 1.0
    """Seconds of the host for an operator, over those of torch's eager mode; graphs of a framework need few."""
    recompute: str | None = None
    """The setting of activation checkpointing if a row does not state it; None: the fastest."""
    layers: bool = False
    """Whether it checkpoints only full layers, and cannot recompute attention alone."""
    over_cp: bool = False
    """Whether parameters are also sharded over the ranks of cp."""
    hidden: bool = False
    """Whether the token exchange of experts overlaps with computation."""
    allocator: bool = False
    """Whether printed memory is that of torch's allocator, without the device's context."""


STACKS = (
    Stack("DeepSeek", r"DualPipe|2412\.19437", "arXiv 2412.19437 section 3: DualPipe hides the exchange, kernels of its own in 8 bits",
          attention="tuned", portable=False, overlapped=True, adds=False, held="nemo", fused_loss=True, fuses=True, hidden=True),
    Stack("torchtitan", r"torchtitan|pytorch/ao|torchao", "docs of torchtitan: FSDP2 over dp x cp, SDPA, fsdp.md, composability.md",
          attention="portable", portable=True, overlapped=True, held="fsdp2", over_cp=True, allocator=True),
    Stack("Automodel", r"Automodel", "NeMo Automodel's performance page: FSDP2, Transformer Engine, DeepEP",
          attention="tuned", portable=False, overlapped=True, held="fsdp2"),
    Stack("Megatron-Core", r"Megatron-Core|Megatron-Bridge|NeMo(?!X)|golden values|TransformerEngine|Transformer Engine|\(TE\)",
          "NVIDIA's recipes: overlap of gradients, gathers and tp, Transformer Engine's attention",
          attention="tuned", portable=False, overlapped=True, adds=False, held="nemo", tiled=True, fused_loss=True, fuses=True),
    Stack("Primus", r"Primus|ROCm|AMD", "Primus: Megatron-LM and torchtitan on Transformer Engine for ROCm, with AITER's attention",
          attention="tuned", portable=False, overlapped=True, adds=False, held="megatron", fuses=True),
    Stack("MegaScale", r"MegaScale;", "arXiv 2402.15627 section 3", attention="portable", portable=False, overlapped=True, adds=False,
          held="megatron",
          tiled=True, fused_loss=True, fuses=True),
    Stack("Llama 3", r"2407\.21783", "arXiv 2407.21783 section 3.3: FSDP shards, no reshard between forward and backward",
          attention="tuned", portable=False, overlapped=True, held="fsdp2", fused_loss=True, fuses=True, recompute="none"),
    Stack("Megatron-DeepSpeed", r"Megatron-DeepSpeed|DeepSpeed\+Megatron|bigscience|vTrain",
          "its repository: ZeRO-1 on Megatron-LM, no overlap; deepspeed.checkpointing is given layers",
          attention="unfused", portable=True, overlapped=False, held="zero", fuses=True, layers=True),
    Stack("Megatron-LM of 2023", r"MegaScale|2401\.10241|InternEvo", "--use-flash-attn since February 2023; no overlap of gradients yet",
          attention="portable", portable=False, overlapped=False, adds=False, held="megatron", fuses=True),
    Stack("Megatron-LM", r"Megatron|2104\.04473|2205\.05198", "before 2023: no fused attention, no overlap of gradients",
          attention="unfused", portable=False, overlapped=False, adds=False, held="megatron", fuses=True),
    Stack("llm-foundry", r"llm-foundry|FULL_SHARD", "its training README: FSDP, Triton's attention of 2023, fused cross-entropy",
          attention="earlier", portable=True, overlapped=True, held="fsdp2", fused_loss=True),
    Stack("JAX", r"JAX|[Mm]ax[Tt]ext|Pax|T5X|TPU|levanter", "XLA: latency hiding, cuDNN's attention, fused pointwise operators",
          attention="tuned", portable=False, overlapped=True, held="fsdp2", fused_loss=True, channels_last=True, fuses=True, launches=0.2),
    Stack("vendor's torch", r"DeepLearningExamples|NGC PyTorch|apex", "DeepLearningExamples: apex, channels last, fused optimizers",
          attention="unfused", portable=True, overlapped=True, held="wide", channels_last=True),
    Stack("graphs", r"TensorFlow 1[^;]*x;|Paddle", "static graphs whose pointwise operators are kernels of their own unless XLA compiles them",
          attention="unfused", portable=True, overlapped=True, held="wide", channels_last=True, launches=0.2),
    Stack("fused graphs", r"OneFlow|MXNet|TensorFlow|tf_cnn", "static graphs with fused kernels; cuDNN, channels last",
          attention="unfused", portable=True, overlapped=True, held="wide", channels_last=True, fuses=True, launches=0.2),
    Stack("thunder", r"thunder|litgpt", "lightning-thunder: cuDNN and Transformer Engine as executors; weights in bf16",
          attention="tuned", portable=False, overlapped=True, held="pure", fused_loss=True, fuses=True),
    Stack("unsloth", r"(?i)unsloth", "its documentation: Triton kernels with backward by hand, fused cross-entropy, checkpoints of layers",
          attention="portable", portable=True, overlapped=True, held="pure", fused_loss=True, fuses=True, recompute="full"),
    Stack("torchtune", r"torchtune|axolotl|trl\b|peft|PEFT|LLaMA-Factory|alignment", "their recipes: models loaded in bf16",
          attention="portable", portable=True, overlapped=True, held="pure"),
    Stack("timm", r"timm|pytorch-image-models", "its benchmark.py: autocast, channels last where it says so"),
    Stack("DeepSpeed", r"DeepSpeed|ZeRO", "its configuration: gradients and gathers overlap, 5e7 elements at once (`stage3_prefetch_bucket_size`); "
          "deepspeed.checkpointing is given layers", attention="portable", portable=True, overlapped=True, held="zero", piece=5e7,
          layers=True),
    Stack("FSDP", r"FSDP|fms-fsdp|nanotron|nnscaler|Colossal", "torch's FSDP and SDPA", attention="portable", portable=True,
          overlapped=True, held="fsdp2"),
)  # fmt: skip
DEFAULT = Stack("torch", "", "torch's documentation")


SAID: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"(?i)channels[-_ ]last|nhwc", {"channels_last": True}),
    (r"(?i)torch\.compile\b|inductor", {"fuses": True}),
    (r"(?i)flash-?attention-?3|\bFA3\b|cudnn (fused )?attention", {"attention": "tuned"}),
    (r"(?i)(without|no) flash|eager attention", {"attention": "unfused"}),
    (r"(?i)liger|fused (linear )?cross.?entropy", {"fused_loss": True}),
    (r"(?i)overlap\w*[- _](moe|ep|a2a|all-?to-?all|expert)|(moe|ep|a2a|all-?to-?all|expert)[- _](parallel[- _])?(comm\w*[- _])?overlap",
     {"hidden": True}),
)  # fmt: skip
"""Facts that a row itself states about its software."""


def text_of(row: dict[str, str]) -> str:
    """Return a row's text about its software."""
    return " ".join(row.get(key) or "" for key in ("source", "table_or_file", "note", "precision"))


def stack_of(row: dict[str, str], known: frozenset[str] | None = None) -> Stack:
    """Return the stack of a row: the first whose words it contains, of those that are `known` by name (None: all)."""
    text = text_of(row)
    found = next((s for s in STACKS if (known is None or s.name in known) and re.search(s.words, text)), DEFAULT)
    for words, change in SAID:
        if re.search(words, text):
            found = replace(found, **change)
    return found
