"""Context parallelism (cp): N ranks compute the same samples, and each of them one shard of the sequence.

What it does
    The model's own forward runs on every rank. Every rank computes embeddings, positions and masks for the full
    sequence. From the first unit with attention on, a unit gets only the rows of this rank. Only its attention needs
    the other sequence shards. In a ring, the keys and values of all shards arrive one after the other. With
    `cp_method=ulysses`, ranks exchange their sequence shards for heads before the attention, and back after it. plait
    finds the sequence dim of each tensor by running the model on two lengths. It checks in float64 that a unit computes
    its rows correctly before it runs the unit on a sequence shard. The sequences of an encoder and of a decoder are
    split separately. Rows of the decoder then attend to those of the encoder, whichever ranks have them. Patches of an
    image are a sequence too, with or without a class token.

    The attention may be other code than torch's function. If the model writes it out (products and a softmax, with its
    own masks, biases and dropout), keys and values are gathered. Each rank then computes the scores of its own queries,
    as in the training of Llama 3. Other operations across positions (a convolution, a recurrence, a Fourier transform,
    a norm over positions) are gathered too, at that operation only. A module whose code cannot be followed
    (`torch.jit`, a `torch.autograd.Function`) runs on the full sequence on every rank. A note says which units do so,
    and how much of their matrix products a rank computes.

Picture
    rank 0   embed all ─► rows 0 1 6 7 ─► attention ⇄ ─► MLP ─► head ─► loss      zigzag: equal work under a causal mask
    rank 1   embed all ─► rows 2 3 4 5 ─► attention ⇄ ─► MLP ─► head ─► loss

Costs
    Memory: activations / N. Every rank keeps all parameters, gradients and optimizer state, or one of N shards with
    `shard_over_cp=true` (see fsdp). Traffic: `ring` sends keys and values N − 1 times in forward, and again with their
    gradients in backward, while it computes. `ulysses` exchanges queries, keys, values and output once. It sends 1/N of
    them per rank, but the rank waits for it. All gradients are summed over cp. Attention that the model writes out
    stores keys and values of the full sequence, and a rank's rows of the score matrix. It gathers keys and values once
    each, and waits.

Choose when
    Sequences are so long that the activations of one sample do not fit, or one sample takes too long. If parameters and
    optimizer state do not fit either, add `shard_over_cp=true`.

Avoid when
    The batch has enough samples for all devices, and one sample fits: `dp` and `fsdp` send less. Or layers are
    recurrent, since every rank runs all of the recurrence. For long sequences, torch's function is the better way to
    write attention.

How it stays exact
    The check compares queries, keys, values and outputs of a sequence shard with the same rows of the full sequence.
    Partial attentions are merged by their log-sum-exps. Dropout draws the values that the shard's rows have in the full
    sequence. The loss gets the full output, so labels that are shifted by one are right at the borders of shards. Each
    rank's gradients are a partial sum over cp. They cover its own rows: in code on the full sequence, gradients of
    other rows are zero.

Paper
    Liu et al. 2023, Ring Attention (ICLR 2024); Jacobs et al. 2023, DeepSpeed Ulysses; Brandon et al. 2023, Striped
    Attention, for the balance; Grattafiori et al. 2024, The Llama 3 Herd of Models, section 3.3.2, for gathered keys
    and values.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn

from plait.config.errors import PlaitError, Problem, summarize_error
from plait.config.plan import Plan
from plait.model.build_model import run_model
from plait.model.sketch import Sketch
from plait.parallel.context.attention import ShardedAttention, check_heads, make_ring_attention, make_ulysses_attention
from plait.parallel.context.runtime import ContextParallelUnits
from plait.parallel.context.sequence_finder import Communication, find_communication, find_sequences
from plait.parallel.context.sequence_shard import SequenceShard
from plait.parallel.context.sequences import SAMPLES, GroupLayout, SequencePlan, localize_sketch, make_sequence_error
from plait.parallel.context.unit_check import check_units
from plait.parallel.context.unit_opening import Layout, check_worth
from plait.parallel.precision import make_trace_context
from plait.parallel.rank_model import SplitModel
from plait.parallel.rank_setup import RankSetup
from plait.parallel.tensor.wiring import wire_slices
from plait.randomness.sub_block import Axis, LocalRowsRule
from plait.tensors.collectives import FakeProcessGroup
from plait.tensors.module_state import restore_forwards
from plait.tensors.parameters import copy_module
from plait.tensors.rows import Rows

AXIS = "cp"
EXACT = True


def is_enabled(plan: Plan) -> bool:
    return plan.cp > 1


def validate(plan: Plan, batch: int, device: str) -> Iterable[Problem]:
    return ()


def inexact_reasons(plan: Plan, sketch: Sketch) -> Iterable[str]:
    return ()


def plan_sequences(setup: RankSetup, sketch: Sketch) -> Sketch:
    """Add the sequence plan to the sketch: found and checked on the full model, before any part of it is removed."""
    plan, model = setup.plan, setup.model

    def run(model: nn.Module, given: object) -> object:
        with make_trace_context(plan, setup.cast, setup.model_device.type, model):
            return run_model(model, given)

    sequence_plan = find_sequences(model, setup.make_samples(SAMPLES)[0], run, sketch)
    heads = plan.cp_method == "ulysses"
    sequence_plan = check_units(
        model, setup.make_samples(1)[0], run, sequence_plan, layout=choose_layout(plan), ranks=plan.cp, heads=heads
    )
    if not any(made.has_attention for made in sequence_plan.calls):
        check_worth(sequence_plan, sketch)
    if plan.tp > 1:
        model = copy_module(model)
        wire_slices(model, sketch, dict(model.named_parameters()), FakeProcessGroup(plan.tp, plan.at(setup.place.rank)["tp"]))
    with restore_forwards(model.modules()):
        parallel_units = ContextParallelUnits(model, sequence_plan, plan.cp)
        parallel_units.wrap()
        try:
            found = find_communication(model, setup.make_samples(SAMPLES)[0], run, parallel_units, choose_layout(plan))
        except PlaitError:
            raise
        except Exception as error:  # it ran on full sequences
            fix = ("move that code into the block before or after it: a block runs on the full sequence if it needs to", "remove cp from the plan")
            raise make_sequence_error("code between units cannot run on a sequence shard", summarize_error(error), *fix) from error
    for number in found.heads if heads else ():
        check_heads(number, plan.cp, plan.tp)
    if plan.pp > 1:
        _check_stages(plan, sketch, sequence_plan, found)
    return replace(sketch, sequence_plan=sequence_plan)


def _check_stages(plan: Plan, sketch: Sketch, sequence_plan: SequencePlan, found: Communication) -> None:
    """Raise P041 if several stages communicate."""
    times = Counter(call.unit for call in sketch.calls)
    why = ""
    for unit in sorted(found.units):
        if not unit:
            why = "code between units gathers the sequence, and several stages run that code"
        elif times[unit] > 1:
            why = f"unit {unit} is called {times[unit]} times, perhaps by several stages"
    if why or len(sequence_plan.calls) != len(sketch.calls):
        what = f"cp={plan.cp} does not work with pp={plan.pp} for this model"
        raise PlaitError(Problem("P041", what, why=why or "its sequence of calls varies", fix=(f'--plan "cp={plan.cp}"',)))


def apply(split: SplitModel) -> SplitModel:
    plan, group, sequence_plan = split.plan, split.mesh.group("cp"), split.sketch.sequence_plan
    parallel_units = ContextParallelUnits(split.module, sequence_plan, plan.cp)
    answer = make_ring_attention if plan.cp_method == "ring" else make_ulysses_attention
    parallel_units.backend = answer(lambda: split.randomness, group)
    parallel_units.make_layout = lambda length: GroupLayout(choose_layout(plan)(length, plan.cp), group.rank(), group)
    if plan.compile:
        parallel_units.attention_hook = torch.compiler.disable(ShardedAttention.attend)
    parallel_units.wrap()
    drawn = frozenset(sequence_plan.draws)

    def map_axis(place: str, dim: int, whole: int | None, local: int) -> Axis | None:
        x, number = split.randomness.drawn_wrapper, sequence_plan.draws.get((place, dim), -1)
        if isinstance(x, SequenceShard):
            return x.sequence_layout.make_axis(local) if dim == x.shard_dim else None
        now = parallel_units.layouts.get(number)
        if now is None or (
            whole and local * sequence_plan.lengths[number] == whole * now.rows.length
        ):  # drawn for all rows
            return None
        return LocalRowsRule(now.rows, now.rank, drawn)(place, dim, whole, local)

    split.randomness.rules.insert(0, map_axis)  # before rules for tensors that have the length of a shard by chance
    split.hooks.optimizer_created.append(lambda _: parallel_units.install())
    return split


def choose_layout(plan: Plan) -> Layout:
    """Choose the layout of a sequence: for a ring, one with equal work under a causal mask."""
    return Rows.make_zigzag if plan.cp_method == "ring" else Rows.make_even


def localize_for_rank(plan: Plan, sketch: Sketch, rank: int) -> Sketch:
    """Replace the outputs of units in the sketch by this rank's: its rows of each sequence."""
    if not is_enabled(plan):
        return sketch
    return localize_sketch(sketch, [choose_layout(plan)(n, plan.cp).sizes[plan.at(rank)[AXIS]] for n in sketch.sequence_plan.lengths])
