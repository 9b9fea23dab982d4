"""The help on a key of a plan: its line, and for a way to split the text of its technique."""

import ast
from pathlib import Path

from plait.config.keys import KEYS, Key

TECHNIQUES = {
    **dict.fromkeys(("pp", "schedule", "stages_per_rank"), "pipeline/strategy"), "dp": "data/strategy",
    **dict.fromkeys(("fsdp", "zero"), "fsdp/strategy"), **dict.fromkeys(("tp", "sequence_parallel", "async_tp"), "tensor/strategy"),
    **dict.fromkeys(("cp", "context"), "context/strategy"), **dict.fromkeys(("ep", "token_dispatcher"), "expert/strategy"),
    "microbatches": "accumulate",
    **dict.fromkeys(
        ("replica_groups", "sync", "every", "start_local", "outer_lr", "outer_momentum", "fragments", "fragment_delay",
         "fragment_alpha"), "replica_groups/strategy"),
    "batch_shares": "shares/strategy",
    "recompute": "recompute", "offload": "offload",
    **dict.fromkeys(("precision", "fp8_recipe"), "precision"), "compile": "compiled", "processes": "threads",
    **dict.fromkeys(("compress", "compress_rank"), "compression/strategy"),
}  # fmt: skip
"""Which file of `parallel/` explains a key of a plan."""


def told(key: Key) -> str:
    return key.help + (f" ({', '.join(key.choices)})" if key.choices else "")


def explained(name: str) -> str:
    """What a key of a plan does; for a way to split, the text of its technique."""
    module = TECHNIQUES.get(name)
    text = f"{name}, in the table [{KEYS[name].table}] of a plan: {told(KEYS[name])}"
    if module is None:
        return text
    source = (Path(__file__).parents[1] / "parallel" / f"{module}.py").read_text(encoding="utf-8")
    return f"{text}\n\n{ast.get_docstring(ast.parse(source))}"
