"""Closed forms over a workload: `TimeModel` predicts seconds; `count_rank_weights` and the functions after it give sizes.

A matmul takes its operations at the sustained rate of the device, half a wave of tiles for its partly filled last wave, and a constant
startup time. A thin matmul takes its bytes at the memory bandwidth instead. Fused attention computes the unmasked scores at the rate of its
kernel generation. Pointwise operators take their bytes; compilation saves a part. A block takes at least the host's time to launch its
operators, which dominates in small models.

On an accelerator, operator launches, plait's own code and message copies overlap with computing. A CPU core runs them one after the other.
Such costs are in units of one small operator's forward pass (`Machine.operator`). They were measured on two idle cores with the plans of
`bench/choice.py`.

The axes that split each parameter come from one table (`workload.make_axis_plan`). Only `count_rank_weights` and `count_shard_weights` divide
by the numbers of ranks. Their results equal the mean over the ranks of a plan's table (`tests/unit/test_planner_memory.py`).
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, inf
from typing import Any, Literal

from plait.config.keys import SAME_LOSS
from plait.config.machine import Machine
from plait.config.plan import Plan
from plait.planner.constants import FITTED, Fitted
from plait.planner.workload import Block, PlannedProduct, Workload

OPERATOR_SECONDS = 9.3e-6
"""Seconds of a small operator's forward pass on a CPU core without measurements."""


@dataclass(frozen=True)
class CoreCosts:
    """Costs of every rank on CPU cores, in units of one small operator."""

    operator: float = OPERATOR_SECONDS
    """Seconds of one small operator."""
    crowd: float = 1.0
    """Processes per core, if there are more processes than cores."""
    launch: float = 1.5
    """Launch of one operator of a model, in forward and again in backward: its code and inputs are no longer in a cache."""
    update: float = 1.7
    """Optimizer update and gradient norm of one operator's weights."""
    step: float = 96.0
    """Fixed cost of a step: reading a batch, the loss, the learning rate, the clock."""
    bucket: float = 36.0
    """All-reduce of one gradient bucket, for every other rank: each one is another message to wait for."""
    hook: float = 1.0
    """Copy of one operator's gradients into a bucket."""
    bucketed: float = 7.0
    """Bytes moved in memory per gradient byte that passes through a bucket."""
    unit: float = 61.0
    """All-gather and reduce-scatter of one fsdp unit, with its hooks."""
    shard: float = 2.3
    """Overhead of one operator whose weights are sharded."""
    fresh: float = 11.0
    """Bytes moved in memory per byte that fsdp, tp, cp and ep gather or scatter: copies into newly allocated pages."""
    wake: float = 70.0
    """A message inside a layer: while all cores compute, the thread that handles it waits for one. Measured in steps of `plait train`."""
    slice: float = 25.5
    """Overhead of tp and cp on one operator, forward and backward."""
    plain: float = 20.5
    """The same of tp without sequence parallelism, where activations between sharded layers are replicated."""
    statistics: float = 2.3
    """Cost of a batch norm's statistics in each direction, as a multiple of a small all-reduce."""
    ahead: float = 138.0
    """One pipeline forward with its messages."""
    passed: float = 1.9
    """Cost per operator of the model in each pipeline forward: the model's own code runs on every stage."""
    behind: float = 195.0
    """One pipeline backward."""
    staged: float = 46.0
    """All-reduce of a pipeline's gradients, which starts after the last backward."""

    @staticmethod
    def from_machine(machine: Machine) -> "CoreCosts":
        crowd = machine.devices_per_node / (machine.cores or machine.devices_per_node)
        return CoreCosts(machine.operator or OPERATOR_SECONDS, max(1.0, crowd))

    def time_launches(self, kernels: float, plan: Plan) -> float:
        """Predict seconds to launch `kernels` operators forward; backward takes as long."""
        stretched = plan.cp > 1 or plan.uses_sequence_shards
        around = (self.slice if stretched else self.plain) / 2 if plan.along(SAME_LOSS) > 1 else 0.0
        return (self.launch + around) * kernels * self.operator

    def time_reduction(self, units: float, kernels: float, size: float, stream: float, plan: Plan) -> float:
        """Predict seconds per step of dp and fsdp without messages, for `size` bytes of weights. `stream`: memory bandwidth in bytes/s."""
        late = self.staged * self.operator if plan.pp > 1 and plan.shares > 1 else 0.0
        if plan.shards > 1:
            again, passes = (plan.microbatches, 3) if plan.zero_stage == 3 else (1, 2)
            copied = again * passes * size * self.fresh / stream
            return (again * self.unit * units + self.shard * kernels) * self.operator + copied + late
        if plan.shares * plan.replica_groups == 1:
            return 0.0
        hooks = (self.bucket * (plan.shares - 1) + self.hook * kernels) * self.operator
        return hooks + size * self.bucketed / stream + late


A100_PEAK = 312e12
"""flop/s of the A100, for which portable attention kernels are written."""
ATTENTION_PEAK = 0.85
"""Maximum fraction of the peak for attention on slower devices: 78 of 111 Tflop/s on an RTX A5000, heads of 64 (gpu-mode/ring-attention, 10)."""
HALF_RATE_KEYS = 1000
"""Number of keys at which attention reaches half of its best rate under a causal mask (FlashAttention-2, arXiv 2307.08691).
Without a mask, a quarter of them is enough (Dao-AILab/flash-attention, pull request 2688: an H100 of 310 Tflop/s reaches 204 with 512 keys and
252 with 1,024)."""
CORE_BLOCK_KEYS = 512
"""Keys per block of torch's attention on CPU cores. Under a causal mask, it computes all blocks that have an unmasked key
(`kvSplitSize` in FlashAttentionKernel.cpp)."""
HALF_RATE_HEAD = 32
"""Head width at which attention reaches half of its best rate: softmax takes equally long for narrow heads.
In FlashAttention-2 and 3, heads of 64 reach 0.8 to 0.9 of the rate of heads of 128."""
RING_MERGE_MOVES = 5
"""Elements moved per output element of attention to add one ring step to the fp32 sums."""
WAVE_ELEMENTS = 128 * 256
"""Result elements that one multiprocessor computes at once."""
TILE_COLUMNS = 64
"""Columns that a kernel computes at once. A partial tile takes as long as a full one ("tile quantization" in NVIDIA's guide)."""
STATISTICS_BYTES = 4096
"""Approximate bytes of a batch norm's statistics; their all-reduce is bound by latency."""
Attention = Literal["earlier", "portable", "tuned"]


@dataclass(frozen=True)
class RuntimeCosts:
    """Number formats and kernels of a framework. The default is plait on torch. Sizes are bytes per element."""

    weights: float = 4.0
    gradients: float = 4.0
    state: float = 8.0
    sent: float = 4.0
    """Bytes per gradient element in reductions."""
    redone: float = 0.0
    """Fraction of weight matmuls that activation_checkpointing=selective recomputes."""
    portable: bool = True
    """The kernels are torch's, not tuned by the vendor for each device."""
    attention: Attention = "portable"
    """Generation of the attention kernels: FlashAttention-1 and Triton of 2023, FlashAttention-2, or kernels tuned for each device."""
    overlapped: bool = True
    """Gradient reductions overlap with backward."""
    hidden: bool = False
    """Expert exchange overlaps with the computing of another micro-batch."""
    once: bool = False
    """Under pp, sharded weights are gathered once per step instead of once per micro-batch."""
    piece: float = inf
    """Maximum number of weight elements in one all-gather."""
    adds: bool = True
    """A separate operator accumulates the gradients of micro-batches, instead of the matmul that computes them."""
    fuses: bool = False
    """Pointwise operators are fused into a few large kernels, as in a compiled model."""
    launches: float = 1.0
    """Host seconds per operator launch, relative to torch's eager mode."""
    channels_last: bool = False
    """Convolutions run in the layout that tensor cores need."""
    casts: float = 1.0
    """Cost of a cast to 8 bits relative to plain rounding. 4-bit formats with transforms and stochastic rounding cost more."""
    tiled: bool = False
    """tp messages overlap tile by tile with the matmul that produces or consumes them (user buffers of Transformer Engine)."""
    action: float = 1e-3
    """Seconds of the pipeline runtime per forward or backward, measured by `bench/pipeline.py`."""
    even: bool = False
    """Stages have equal numbers of blocks, regardless of their cost."""
    cores: CoreCosts | None = None
    """The devices are processes on CPU cores: nothing overlaps with computing."""


def get_expert_factor(plan: Plan) -> int:
    """Return the factor on the rows of a rank's experts: under allgather, a rank computes the rows of all ep ranks."""
    return plan.ep if plan.token_dispatcher == "allgather" else 1


def get_itemsize(plan: Plan) -> float:
    """Return the bytes per element of activations and gathered weights."""
    return 4.0 if plan.precision in ("fp32", "tf32") else 2.0


@dataclass(frozen=True)
class BlockTime:
    """Seconds of one block for one micro-batch on one rank."""
    forward: float
    back_input: float
    """Backward to the inputs, for which the previous stage waits, with recomputation."""
    back_weight: float
    again: float
    """Recomputation, a part of `back_input`."""
    sent: float
    """Collectives of tp, cp and ep in forward and backward."""


@dataclass
class TimeModel:
    """Predicts seconds of the blocks of a workload on a machine. Results are cached, because many plans share them."""

    work: Workload
    machine: Machine
    software: RuntimeCosts = RuntimeCosts()
    fitted: Fitted = FITTED
    loader_rate: float = 0.0
    """Measured samples per second of one rank's loader; 0 if not measured, then loading costs nothing."""
    block_times: dict[Any, BlockTime] = field(default_factory=dict, init=False)
    slower_models: "dict[float, TimeModel]" = field(default_factory=dict, init=False)

    @cached_property
    def trained_costs(self) -> RuntimeCosts:
        """Mean costs per weight: frozen weights have no gradient and no optimizer state."""
        part = 1 - self.work.frozen
        return replace(self.software, gradients=self.software.gradients * part, state=self.software.state * part)

    def with_speed(self, speed: float) -> "TimeModel":
        """Return the model for a device with this fraction of the speed. Links and the host of an accelerator keep theirs."""
        if speed == 1.0:
            return self
        if speed not in self.slower_models:
            cores = self.software.cores
            software = replace(self.software, cores=cores and replace(cores, operator=cores.operator / speed))
            machine = replace(self.machine, device=self.machine.device.scale_rates(speed))
            self.slower_models[speed] = replace(self, machine=machine, software=software)
        return self.slower_models[speed]

    def time_block(self, block: Block, plan: Plan, samples: float) -> BlockTime:
        """Predict one of `block.count` equal blocks, for a micro-batch of `samples` samples."""
        shares, cuts = plan.shares if block.statistics else 1, (plan.tp, plan.cp, plan.ep)
        ways = (plan.uses_sequence_shards, plan.cp_method, plan.token_dispatcher, plan.activation_checkpointing, plan.precision, plan.compile,
            plan.microbatches > 1, plan.zero_stage)
        key = (id(block), samples, shares, cuts, ways)
        if key not in self.block_times:
            self.block_times[key] = self._time_block(block, plan, samples)
        return self.block_times[key]

    def _time_block(self, block: Block, plan: Plan, samples: float) -> BlockTime:
        times = [(p, self.time_product(p, plan, samples)) for p in block.products]
        weight = sum(t for p, t in times if p.weight)
        attention = sum(t for p, t in times if not p.weight)
        products = weight + attention
        point = self.time_pointwise(block, plan, samples)
        sent, exchanged = self.time_tp_sums(block, plan, samples), self.time_expert_exchange(block, plan, samples)
        sent += self.time_exposed(exchanged, products) if self.software.hidden else exchanged
        sent += self.time_cp_messages(block, plan, samples, attention) + self.time_batch_norms(block, plan)
        forward, back = products + point, 2 * products + point * self.fitted.back
        if self.software.cores is None:
            launch = block.kernels * self.fitted.host * self.software.launches * (0.5 if plan.compile else 1.0)
            forward, back = max(forward, launch), max(back, launch * 1.5)
        else:
            launch = self.software.cores.time_launches(block.kernels, plan)
            forward, back = forward + launch, back + launch
        again = 0.0
        if plan.activation_checkpointing == "full":
            again = forward
        elif plan.activation_checkpointing == "selective":
            again = self.software.redone * weight + point if any(p.fused for p in block.products) else attention
        back_weight = (weight + self.time_accumulation(block, plan)) * (1 - self.work.frozen)
        both = 2 * sent + (sent if plan.activation_checkpointing == "full" else 0.0)
        return BlockTime(forward + sent, back - weight + again + both - sent, back_weight, again, both)

    def time_product(self, product: PlannedProduct, plan: Plan, samples: float) -> float:
        """Predict seconds of all `times` calls of a matmul on one rank."""
        fitted = self.fitted
        rows, inner, columns, batch = product.rows, product.inner, product.columns, product.batch
        rows /= plan.cp if product.sequence else 1
        rows *= get_expert_factor(plan) / self.count_row_shards(plan) if product.experts else 1
        columns = product.count_columns(plan.tp) if product.cut == "columns" else columns
        inner /= plan.tp if product.cut == "inner" else 1
        batch /= plan.tp if product.cut == "batch" else 1
        rows *= samples if product.grows == "rows" else 1
        batch *= samples if product.grows == "batch" else 1
        made = columns if self.software.cores else ceil(columns / TILE_COLUMNS) * TILE_COLUMNS if product.weight else columns
        flops = 2 * rows * inner * made * batch
        precision = "bf16" if plan.precision == "fp8" and not product.weight else plan.precision
        peak = self.get_peak(precision)
        if product.fused:
            block = CORE_BLOCK_KEYS / max(inner, columns) if self.software.cores else 0.0
            masked = max(0.0, 1 - block) / 2 if product.causal else 0.0
            needed = flops * (1 - masked) / (peak * self.get_attention_fraction(product, plan))
            return product.times * (needed + 2 * fitted.ramp)
        held = product.experts / plan.ep or 1.0
        size = (rows * inner + inner * columns * held + rows * columns) * batch * get_itemsize(plan)
        rate = (
            peak
            * self.get_matmul_fraction(precision, flops)
            * (self.get_conv_fraction(precision) if product.convolution and not self.software.cores else 1.0)
        )
        ramp = 0.0 if self.machine.matmuls else fitted.ramp  # a measured curve includes it
        return product.times * (
            max((flops + self.count_wave_loss(inner)) / rate + ramp, size / self.memory_bandwidth)
            + fitted.apart * product.experts / plan.ep
        )

    def get_peak(self, precision: str) -> float:
        """Return the flop/s of the data sheet for a format, or for the next wider format if it lists none."""
        order = ("fp8", "bf16", "fp16", "tf32", "fp32")
        wider = order[order.index(precision) :] if precision in order else ()
        return next(rate for name in (*wider, *order) if (rate := self.machine.device.peak.for_precision(name)))

    def get_matmul_fraction(self, precision: str, flops: float) -> float:
        """Return the fraction of the peak that a matmul of `flops` operations sustains."""
        if any(m.precision == precision for m in self.machine.matmuls):
            return self.machine.matmul_fraction(precision, flops) or 1.0
        if precision == "fp32":
            return self.fitted.plain * (self.machine.device.achievable.fp32 or 1.0)
        best = self.machine.device.achievable
        return (best.for_precision(precision) or best.bf16 or 0.8) * self.fitted.top

    def get_attention_fraction(self, product: PlannedProduct, plan: Plan) -> float:
        """Return the fraction of the peak that attention reaches on unmasked scores, by kernel generation, keys and head width."""
        fitted, ratio = self.fitted, A100_PEAK / self.get_peak("bf16")
        if self.software.cores:
            return fitted.fused
        keys, head = max(product.inner, product.columns), min(product.inner, product.columns)
        keys /= plan.cp if plan.cp_method == "ring" else 1  # each ring step is a separate kernel
        filled = (1 + HALF_RATE_HEAD / 128) / (1 + HALF_RATE_HEAD / head) / (1 + HALF_RATE_KEYS / (1 if product.causal else 4) / keys)
        if self.software.attention == "tuned" and ratio < 1:
            return fitted.tuned * filled
        best = min(ATTENTION_PEAK, fitted.fused * ratio**fitted.portable)
        return filled * best * (fitted.earlier if self.software.attention == "earlier" else 1.0)

    def get_conv_fraction(self, precision: str) -> float:
        """Return the fraction of the matmul rate that convolutions reach."""
        if precision == "fp32":
            return self.fitted.windows32
        return self.fitted.windows_tuned if self.software.channels_last else self.fitted.windows

    def count_wave_loss(self, inner: float) -> float:
        """Count the operations that a full last wave of tiles would have added ("wave quantization" in NVIDIA's guide)."""
        units = 0 if self.machine.matmuls or self.software.cores else self.machine.device.multiprocessors or 0
        return self.fitted.waves * 2 * WAVE_ELEMENTS * inner * units

    @property
    def memory_bandwidth(self) -> float:
        """Sustained bytes/s of device memory."""
        return (self.machine.device.memory_bandwidth or 1e12) * self.fitted.stream

    @property
    def host_bandwidth(self) -> float:
        """Bytes/s between a device and its host."""
        return self.machine.host or 1e10

    def time_exposed(self, sent: float, computing: float) -> float:
        """Predict exposed seconds of messages that take `sent` seconds, next to `computing` seconds, with the compute slowdown from overlap."""
        if not self.software.overlapped or self.software.cores is not None:
            return sent
        slowed = self.fitted.contention * sent
        return slowed + max(0.0, sent - slowed - self.fitted.overlap * computing)

    def count_row_shards(self, plan: Plan) -> int:
        """Return the number of tp ranks over which rows of a mixture are split: all if ep spans them."""
        return plan.tp if plan.ep > 1 and plan.uses_sequence_shards else 1

    def time_pointwise(self, block: Block, plan: Plan, samples: float) -> float:
        """Predict seconds of a block's pointwise operators in forward."""
        fitted, spread = self.fitted, plan.tp if plan.uses_sequence_shards else 1
        fused = plan.compile or self.software.fuses
        elements = block.moved_cut / plan.tp + (block.moved - block.moved_cut) / spread
        elements *= fitted.moved * (fitted.joined if fused else 1.0)
        elements += fitted.scores * block.scores / plan.tp
        if plan.precision == "fp8":
            made = sum(p.rows * (p.inner + p.columns) * p.times for p in block.products if p.weight)
            elements += (fitted.narrow if fused else fitted.cast) * self.software.casts * made / plan.tp
        return elements / plan.cp * samples * get_itemsize(plan) / self.memory_bandwidth

    def time_accumulation(self, block: Block, plan: Plan) -> float:
        """Predict seconds of gradient accumulation. On CPU cores, it is included in other costs."""
        if plan.microbatches == 1 or self.software.cores or not self.software.adds:
            return 0.0
        elements = count_shard_weights(block, plan) if plan.zero_stage == 3 else count_rank_weights(block, plan)
        return elements * (2 * self.software.gradients + get_itemsize(plan)) / self.memory_bandwidth

    def time_core_messages(self, count: float, size: float) -> float:
        """Predict seconds of `count` messages of `size` bytes inside layers in addition to those of the links, on CPU cores that compute."""
        cores = self.software.cores
        return count * (cores.wake * cores.operator + cores.fresh * size / self.memory_bandwidth) if cores else 0.0

    def time_tp_sums(self, block: Block, plan: Plan, samples: float) -> float:
        """Predict seconds of tp all-reduces in forward. With sequence parallelism, reduce-scatter and all-gather take as long."""
        if plan.tp == 1 or not block.tp_sums:
            return 0.0
        size = block.out * samples / plan.cp * get_itemsize(plan)
        shown = self.fitted.tiled if self.software.tiled and plan.uses_sequence_shards else self.fitted.sums
        return shown * block.tp_sums * self.machine.all_reduce(size, plan.tp) + self.time_core_messages(2 * block.tp_sums, size)

    def time_batch_norms(self, block: Block, plan: Plan) -> float:
        """Predict seconds to all-reduce batch-norm statistics in forward."""
        if plan.shares == 1 or not block.statistics:
            return 0.0
        sums = self.software.cores.statistics if self.software.cores else 1.0
        return sums * block.statistics * self.machine.all_reduce(STATISTICS_BYTES, plan.shares, plan.along(SAME_LOSS))

    def time_expert_exchange(self, block: Block, plan: Plan, samples: float) -> float:
        """Predict seconds to send rows to experts and back."""
        if plan.ep == 1 or not block.routed:
            return 0.0
        size = block.routed * samples / plan.cp / self.count_row_shards(plan) * get_itemsize(plan)
        choices = max(p.rows for p in block.products if p.experts) / min(p.rows for p in block.products)
        stride = 1 if self.count_row_shards(plan) > 1 else plan.along(SAME_LOSS)
        if plan.token_dispatcher == "allgather":
            size *= plan.ep / choices
            sent = self.machine.all_gather(size, plan.ep, stride) + self.machine.reduce_scatter(size, plan.ep, stride)
            return sent + self.time_core_messages(2, size)
        if not self.software.portable:  # a row is sent once per node, or once per rank of a single node
            nodes = -(-plan.ep * stride // self.machine.devices_per_node)
            places = nodes if nodes > 1 else plan.ep
            size *= places * (1 - (1 - 1 / places) ** choices) / choices
        return 2 * self.machine.all_to_all(size, plan.ep, stride) + self.time_core_messages(2, size)

    def time_cp_messages(self, block: Block, plan: Plan, samples: float, attention: float) -> float:
        """Predict exposed seconds of cp messages next to attention."""
        if plan.cp == 1 or not block.keys:
            return 0.0
        if plan.cp_method == "ulysses":
            size = (block.keys + 2 * block.out) * samples / plan.cp / plan.tp * get_itemsize(plan)
            return self.machine.all_to_all(size, plan.cp, plan.tp) + self.time_core_messages(2, size)
        size = block.keys * samples / plan.cp / plan.tp * get_itemsize(plan)
        hops = (plan.cp - 1) * self.machine.send(size, plan.tp) + self.time_core_messages(1.5 * (plan.cp - 1), size)  # twice in backward
        made = max((p.rows * min(p.inner, p.columns) * p.batch for p in block.products if p.fused), default=0.0)
        merging = (plan.cp - 1) / plan.cp * RING_MERGE_MOVES * made * samples / plan.tp * get_itemsize(plan) / self.memory_bandwidth
        return self.time_exposed(hops, attention) + merging


def count_rank_weights(block: Block, plan: Plan) -> float:
    """Count the weight elements of one block on one rank, before fsdp."""
    again = sum(p.inner * (p.count_columns(plan.tp) - p.columns / plan.tp) for p in block.products if p.head)
    return block.weights_cut / plan.tp + again + block.weights - block.weights_cut + block.experts / plan.ep


def count_shard_weights(block: Block, plan: Plan) -> float:
    """Count the weight elements of one block on one rank, after fsdp. Experts are sharded only over the fsdp ranks that have the same experts under
    ep."""
    experts = block.experts / plan.ep
    return (count_rank_weights(block, plan) - experts) / plan.shards + experts / plan.expert_shards


@dataclass(frozen=True)
class BlockSize:
    """Sizes of one block on one rank.

    Elements: its weights before and after sharding, and the elements gathered for it. Bytes: activations kept of a micro-batch, and the temporary
    memory of recomputation.
    """

    weights: float
    sharded: float
    gathered: float
    kept: float
    recompute_bytes: float

    @staticmethod
    def from_block(block: Block, plan: Plan, samples: float, software: RuntimeCosts) -> "BlockSize":
        own = count_rank_weights(block, plan)
        unsharded = 0.0 if plan.expert_shards > 1 else block.experts / plan.ep  # a rank already has these experts, so they are not gathered
        spread, scale = plan.tp if plan.uses_sequence_shards else 1, samples / plan.cp * get_itemsize(plan)
        kept = (block.kept_cut / plan.tp + (block.kept - block.kept_cut) / spread) * scale
        kept += (get_expert_factor(plan) - 1) * sum(p.rows * p.inner * p.times for p in block.products if p.experts) * scale
        if plan.precision == "fp8" and not software.portable:
            kept *= FP8_KEPT
        moment = 0.0
        if plan.activation_checkpointing == "full" and block.count > 1:
            kept, moment = block.inputs / spread * scale, kept
        elif plan.activation_checkpointing == "selective":
            kept -= block.kept_selective / plan.tp * scale
        return BlockSize(own, count_shard_weights(block, plan), own - unsharded, kept, moment)


FP8_KEPT = 0.85
"""Fraction of kept activations that remains if inputs of fp8 matmuls are kept in 8 bits. torch keeps them in 16 bits."""


def sum_state_bytes(zero: int, offload: str, software: RuntimeCosts, own: float, parts: float) -> dict[str, float]:
    """Sum the bytes of parameters, gradients and optimizer state on a device.

    `own`: weight elements that the rank computes with; `parts`: elements after fsdp; `zero`: ZeRO stage, or 0 if nothing is sharded.
    """
    away = offload == "all"
    return {
        "parameters": ((0.0 if away else parts) if zero == 3 else own) * software.weights,
        "gradients": 0.0 if away else (parts if zero >= 2 else own) * software.gradients,
        "optimizer": 0.0 if offload != "none" else (parts if zero else own) * software.state,
    }
