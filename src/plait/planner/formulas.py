"""What a plan takes, in closed forms over a workload: `TimeModel` for seconds, `weights` and what follows it for bytes.

A matmul takes its operations at the rate that the device sustains, half a wave of tiles more, since its last wave does not fill the device,
and a constant for starting and ending; if it is thin, its bytes at the memory's bandwidth instead. Fused attention computes what its mask
leaves, at the rate of its generation of kernels. Pointwise operators take their bytes, of which compiling saves a part. A block never takes
less than the host needs to launch its operators, which is what small models spend their time on.

On an accelerator, launching operators, plait's own code and copying messages go on beside the computing. A processor's core
does one after the other. Such costs are counted in operators: the time of the forward pass of a small one
(`Machine.operator`). They were measured on two idle cores with the plans of `bench/choice.py`.

Which axes split which parameter a workload has from one table (`from_sketch.sharding`), and `weights` and `sharded` divide by the numbers of
ranks, here alone: as much as the ranks of a plan's table have on average (`tests/unit/test_planner_memory.py`).
"""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import ceil, inf
from typing import Any, Literal

from plait.config.hardware import Rates
from plait.config.keys import SAME_LOSS
from plait.config.machine import Machine
from plait.config.plan import Plan
from plait.planner.constants import FITTED, Fitted
from plait.planner.from_sketch import Block, PlannedProduct, Workload

OPERATOR = 9.3e-6
"""Seconds of a small operator's forward pass on a processor where nothing was measured."""


@dataclass(frozen=True)
class Cores:
    """Costs in operators, of every rank."""

    operator: float = OPERATOR
    """Seconds."""
    crowd: float = 1.0
    """Processes for each core, where there are more of them than cores."""
    launch: float = 1.5
    """An operator of a model, forward, and again backward: its code and what it reads are no longer in a cache."""
    update: float = 1.7
    """An operator's weights in the optimizer and in the gradient norm."""
    step: float = 96.0
    """A step: reading a batch, the loss, the learning rate, the clock."""
    bucket: float = 36.0
    """The sum of a bucket of gradients, for every other rank: each is another message to wake up for."""
    hook: float = 1.0
    """An operator's gradients on their way into a bucket."""
    bucketed: float = 7.0
    """Bytes moved in memory for one of gradients that goes through a bucket."""
    unit: float = 61.0
    """A unit of fsdp, gathered and scattered, with its hooks."""
    shard: float = 2.3
    """An operator's weights that are parts."""
    fresh: float = 14.4
    """Bytes moved in memory for one that fsdp gathers or scatters: through copies, in pages just taken from the system."""
    slice: float = 25.5
    """What tp and cp put around an operator, forward and backward."""
    plain: float = 20.5
    """The same of tp alone, where what lies between slices is whole on every rank."""
    statistics: float = 2.3
    """All-reduces of a few bytes, in time, that a batch norm takes in each direction."""
    ahead: float = 138.0
    """A forward of a pipeline, with its messages."""
    passed: float = 1.9
    """For every operator of the model, in each of them: the model's own code runs on every stage."""
    behind: float = 195.0
    """A backward of a pipeline."""
    staged: float = 46.0
    """The sum of a pipeline's gradients, which begins when the last backward has ended."""

    @staticmethod
    def of(machine: Machine) -> "Cores":
        crowd = machine.devices_per_node / (machine.cores or machine.devices_per_node)
        return Cores(machine.operator or OPERATOR, max(1.0, crowd))

    def passes(self, kernels: float, plan: Plan) -> float:
        """Seconds to launch so many operators forward; backward takes as long."""
        stretched = plan.cp > 1 or plan.stretched
        around = (self.slice if stretched else self.plain) / 2 if plan.along(SAME_LOSS) > 1 else 0.0
        return (self.launch + around) * kernels * self.operator

    def reduced(self, units: float, kernels: float, size: float, stream: float, plan: Plan) -> float:
        """Seconds of a step that dp and fsdp take besides messages, for `size` bytes of weights; `stream`: bytes/s of memory."""
        late = self.staged * self.operator if plan.pp > 1 and plan.shares > 1 else 0.0
        if plan.shards > 1:
            again, passes = (plan.microbatches, 3) if plan.zero_stage == 3 else (1, 2)
            copied = again * passes * size * self.fresh / stream
            return (again * self.unit * units + self.shard * kernels) * self.operator + copied + late
        if plan.shares * plan.replica_groups == 1:
            return 0.0
        hooks = (self.bucket * (plan.shares - 1) + self.hook * kernels) * self.operator
        return hooks + size * self.bucketed / stream + late


REFERENCE = 312e12
"""flop/s of the A100, which portable attention kernels are written for."""
MOST = 0.85
"""Part of its peak that attention reaches on a slower device: of 111 Tflop/s of an RTX A5000 78, with heads of 64 (gpu-mode/ring-attention, 10)."""
FILLED = 1000
"""Keys with which an attention kernel reaches half of its best rate under a causal mask (FlashAttention-2, arXiv 2307.08691), and a quarter of
them without (Dao-AILab/flash-attention, pull request 2688: of 310 Tflop/s on an H100 204 with 512 keys, 252 with 1,024)."""
HEAD = 32
"""Width of a head at which its kernel reaches half of its best rate: softmax takes as long for narrow heads (FlashAttention-2 and 3: heads of
64 reach 0.8 to 0.9 of the rate of 128)."""
MERGED = 5
"""Elements moved to add a step of a ring to what is there, for each of attention's output: sums are in 32 bits."""
WAVE = 128 * 256
"""Elements of a result that one multiprocessor makes at once."""
TILE = 64
"""Columns that a device's kernel makes at once: a part of a tile takes as long as a whole one (NVIDIA's guide to matrix
multiplication calls it tile quantization)."""
STATISTICS = 4096
"""Bytes of a batch norm's statistics, about: what their sum takes is a matter of latency."""
Attention = Literal["earlier", "portable", "tuned"]


@dataclass(frozen=True)
class Software:
    """What a framework does with its numbers, and how. The default is plait on torch. Bytes of an element."""

    weights: float = 4.0
    gradients: float = 4.0
    state: float = 8.0
    sent: float = 4.0
    """Of gradients in the messages that add them up."""
    redone: float = 0.0
    """Part of the matmuls with weights that activation_checkpointing=selective does again."""
    portable: bool = True
    """Kernels are torch's, not tuned by the vendor for each device."""
    attention: Attention = "portable"
    """The generation of its kernels: FlashAttention-1 and Triton's of 2023, FlashAttention-2, or those made for each device."""
    overlapped: bool = True
    """Gradients are reduced while backward goes on."""
    hidden: bool = False
    """Rows travel to experts and back while those of another micro-batch compute."""
    once: bool = False
    """Under pp, weights that are sharded are gathered once a step, not once a micro-batch."""
    piece: float = inf
    """Elements of weights that one message gathers at most."""
    adds: bool = True
    """An operator of its own adds the gradients of micro-batches up, not the matmul that makes them."""
    fuses: bool = False
    """Pointwise operators are few large kernels, as a compiled model's are."""
    launches: float = 1.0
    """Seconds of the host for an operator, over those of torch's eager mode."""
    channels_last: bool = False
    """Convolutions run on the layout that tensor cores take."""
    casts: float = 1.0
    """What making an 8-bit number takes, over that of a plain rounding: more for 4-bit formats, with transforms and dice."""
    tiled: bool = False
    """Messages of tp go tile by tile beside the matmul that makes or takes them (user buffers of Transformer Engine)."""
    action: float = 1e-3
    """Seconds that a pipeline's runner takes of its own for a forward or a backward: measured by `bench/pipeline.py`."""
    even: bool = False
    """Stages have equal numbers of blocks, whatever they cost."""
    cores: Cores | None = None
    """Devices are processes on cores: nothing goes on beside the computing."""


def met(plan: Plan) -> int:
    """How many times the rows that its own tokens send a rank's experts compute: under allgather those of all ranks."""
    return plan.ep if plan.token_dispatcher == "allgather" else 1


def item(plan: Plan) -> float:
    """Bytes of an element of what flows between operators, and of gathered weights."""
    return 4.0 if plan.precision in ("fp32", "tf32") else 2.0


@dataclass(frozen=True)
class BlockTime:
    """Seconds of one block for one micro-batch on one rank."""
    forward: float
    back_input: float
    """The half of backward that the stage before waits for, with what is computed again."""
    back_weight: float
    again: float
    """Of `back_input`: recomputation."""
    sent: float
    """Of a whole forward and backward: collectives of tp, cp and ep."""


@dataclass
class TimeModel:
    """Times the blocks of one workload on one machine; remembers them, since many plans share them."""

    work: Workload
    machine: Machine
    software: Software = Software()
    fitted: Fitted = FITTED
    loading: float = 0.0
    """Samples per second that one rank's loader was measured to read; 0: not measured, and taken to keep up."""
    known: dict[Any, BlockTime] = field(default_factory=dict)
    slower: "dict[float, TimeModel]" = field(default_factory=dict)

    @cached_property
    def trained(self) -> Software:
        """What it keeps of a weight in the mean: what is frozen has no gradient and no state."""
        part = 1 - self.work.frozen
        return replace(self.software, gradients=self.software.gradients * part, state=self.software.state * part)

    def on(self, speed: float) -> "TimeModel":
        """On a device that computes at this part of the speed. Links and the host of an accelerator are as fast as they were."""
        if speed == 1.0:
            return self
        if speed not in self.slower:
            machine, cores = self.machine, self.software.cores
            peaks = {f.name: (getattr(machine.device.peak, f.name) or 0.0) * speed or None for f in fields(Rates)}
            memory = (machine.device.memory_bandwidth or 1e12) * speed
            device = replace(machine.device, peak=Rates(**peaks), memory_bandwidth=memory)
            software = replace(self.software, cores=cores and replace(cores, operator=cores.operator / speed))
            self.slower[speed] = replace(self, machine=replace(machine, device=device), software=software, known={}, slower={})
        return self.slower[speed]

    def block(self, block: Block, plan: Plan, samples: float) -> BlockTime:
        """One of `block.count` alike ones, for a micro-batch of so many samples."""
        shares, cuts = plan.shares if block.statistics else 1, (plan.tp, plan.cp, plan.ep)
        ways = (plan.stretched, plan.cp_method, plan.token_dispatcher, plan.activation_checkpointing, plan.precision, plan.compile,
            plan.microbatches > 1, plan.zero_stage)
        key = (id(block), samples, shares, cuts, ways)
        if key not in self.known:
            self.known[key] = self._block(block, plan, samples)
        return self.known[key]

    def _block(self, block: Block, plan: Plan, samples: float) -> BlockTime:
        times = [(p, self.product(p, plan, samples)) for p in block.products]
        weight = sum(t for p, t in times if p.weight)
        attention = sum(t for p, t in times if not p.weight)
        products = weight + attention
        point = self.pointwise(block, plan, samples)
        sent, exchanged = self.sums(block, plan, samples), self.exchanged(block, plan, samples)
        sent += self.exposed(exchanged, products) if self.software.hidden else exchanged
        sent += self.rotated(block, plan, samples, attention) + self.gauged(block, plan)
        forward, back = products + point, 2 * products + point * self.fitted.back
        if self.software.cores is None:
            launch = block.kernels * self.fitted.host * self.software.launches * (0.5 if plan.compile else 1.0)
            forward, back = max(forward, launch), max(back, launch * 1.5)
        else:
            launch = self.software.cores.passes(block.kernels, plan)
            forward, back = forward + launch, back + launch
        again = 0.0
        if plan.activation_checkpointing == "full":
            again = forward
        elif plan.activation_checkpointing == "selective":
            again = self.software.redone * weight + point if any(p.fused for p in block.products) else attention
        back_weight = (weight + self.added(block, plan)) * (1 - self.work.frozen)
        both = 2 * sent + (sent if plan.activation_checkpointing == "full" else 0.0)
        return BlockTime(forward + sent, back - weight + again + both - sent, back_weight, again, both)

    def product(self, product: PlannedProduct, plan: Plan, samples: float) -> float:
        """Seconds of a matmul (all its `times`) on one rank."""
        fitted = self.fitted
        rows, inner, columns, batch = product.rows, product.inner, product.columns, product.batch
        rows /= plan.cp if product.sequence else 1
        rows *= met(plan) / self.thin(plan) if product.experts else 1
        columns = product.columns_of(plan.tp) if product.cut == "columns" else columns
        inner /= plan.tp if product.cut == "inner" else 1
        batch /= plan.tp if product.cut == "batch" else 1
        rows *= samples if product.grows == "rows" else 1
        batch *= samples if product.grows == "batch" else 1
        made = columns if self.software.cores else ceil(columns / TILE) * TILE if product.weight else columns
        flops = 2 * rows * inner * made * batch
        precision = "bf16" if plan.precision == "fp8" and not product.weight else plan.precision
        peak = self.peak(precision)
        if product.fused:
            needed = flops / (2 if product.causal else 1) / (peak * self.attention(product, plan))
            return product.times * (needed + 2 * fitted.ramp)
        held = product.experts / plan.ep or 1.0
        size = (rows * inner + inner * columns * held + rows * columns) * batch * item(plan)
        rate = peak * self.reach(precision, flops) * (self.convolved(precision) if product.convolution and not self.software.cores else 1.0)
        ramp = 0.0 if self.machine.matmuls else fitted.ramp  # a measured curve has it in it
        return product.times * (max((flops + self.unfilled(inner)) / rate + ramp, size / self.stream) + fitted.apart * product.experts / plan.ep)

    def peak(self, precision: str) -> float:
        """flop/s of the data sheet; of the nearest wider format, where it has none for this one."""
        order = ("fp8", "bf16", "fp16", "tf32", "fp32")
        wider = order[order.index(precision) :] if precision in order else ()
        return next(rate for name in (*wider, *order) if (rate := self.machine.device.peak.of(name)))

    def reach(self, precision: str, flops: float) -> float:
        """The part of the peak that a matmul of so many operations sustains."""
        if any(m.precision == precision for m in self.machine.matmuls):
            return self.machine.matmul_fraction(precision, flops) or 1.0
        if precision == "fp32":
            return self.fitted.plain * (self.machine.device.achievable.fp32 or 1.0)
        best = self.machine.device.achievable
        return (best.of(precision) or best.bf16 or 0.8) * self.fitted.top

    def attention(self, product: PlannedProduct, plan: Plan) -> float:
        """The part of the peak that kernels of attention reach on what a mask leaves: by their generation, keys and width of a head."""
        fitted, ratio = self.fitted, REFERENCE / self.peak("bf16")
        if self.software.cores:
            return fitted.fused
        keys, head = max(product.inner, product.columns), min(product.inner, product.columns)
        keys /= plan.cp if plan.cp_method == "ring" else 1  # each step of the ring is a kernel of its own
        filled = (1 + HEAD / 128) / (1 + HEAD / head) / (1 + FILLED / (1 if product.causal else 4) / keys)
        if self.software.attention == "tuned" and ratio < 1:
            return fitted.tuned * filled
        best = min(MOST, fitted.fused * ratio**fitted.portable)
        return filled * best * (fitted.earlier if self.software.attention == "earlier" else 1.0)

    def convolved(self, precision: str) -> float:
        """The part of a matmul's rate that convolutions reach."""
        if precision == "fp32":
            return self.fitted.windows32
        return self.fitted.windows_tuned if self.software.channels_last else self.fitted.windows

    def unfilled(self, inner: float) -> float:
        """Operations that the last wave of tiles of a matmul would have held besides: NVIDIA's guide calls it wave quantization."""
        units = 0 if self.machine.matmuls or self.software.cores else self.machine.device.multiprocessors or 0
        return self.fitted.waves * 2 * WAVE * inner * units

    @property
    def stream(self) -> float:
        """Bytes/s of device memory that operators reach."""
        return (self.machine.device.memory_bandwidth or 1e12) * self.fitted.stream

    @property
    def beside(self) -> float:
        """Bytes/s between a device and its host."""
        return self.machine.host or 1e10

    def exposed(self, sent: float, computing: float) -> float:
        """Seconds that messages of `sent` seconds add to so much computing: what it does not hide, and what they take of the device."""
        if not self.software.overlapped or self.software.cores is not None:
            return sent
        slowed = self.fitted.contention * sent
        return slowed + max(0.0, sent - slowed - self.fitted.overlap * computing)

    def thin(self, plan: Plan) -> int:
        """Ranks of tp between which the rows of a mixture are shared out: all, where ep spans them."""
        return plan.tp if plan.ep > 1 and plan.stretched else 1

    def pointwise(self, block: Block, plan: Plan, samples: float) -> float:
        """Seconds of the operators of a block's forward that are not products."""
        fitted, spread = self.fitted, plan.tp if plan.stretched else 1
        fused = plan.compile or self.software.fuses
        elements = block.moved_cut / plan.tp + (block.moved - block.moved_cut) / spread
        elements *= fitted.moved * (fitted.joined if fused else 1.0)
        elements += fitted.scores * block.scores / plan.tp
        if plan.precision == "fp8":
            made = sum(p.rows * (p.inner + p.columns) * p.times for p in block.products if p.weight)
            elements += (fitted.narrow if fused else fitted.cast) * self.software.casts * made / plan.tp
        return elements / plan.cp * samples * item(plan) / self.stream

    def added(self, block: Block, plan: Plan) -> float:
        """Seconds to add a micro-batch's gradients to those before: of a processor's core, a part of its other costs."""
        if plan.microbatches == 1 or self.software.cores or not self.software.adds:
            return 0.0
        elements = sharded(block, plan) if plan.zero_stage == 3 else weights(block, plan)
        return elements * (2 * self.software.gradients + item(plan)) / self.stream

    def sums(self, block: Block, plan: Plan, samples: float) -> float:
        """Seconds of the sums over tp in a forward; with sequence parallelism two halves of the same length."""
        if plan.tp == 1 or not block.handovers:
            return 0.0
        size = block.out * samples / plan.cp * item(plan)
        shown = self.fitted.tiled if self.software.tiled and plan.stretched else self.fitted.sums
        return shown * block.handovers * self.machine.all_reduce(size, plan.tp)

    def gauged(self, block: Block, plan: Plan) -> float:
        """Seconds to sum the statistics of batch norms in a forward."""
        if plan.shares == 1 or not block.statistics:
            return 0.0
        sums = self.software.cores.statistics if self.software.cores else 1.0
        return sums * block.statistics * self.machine.all_reduce(STATISTICS, plan.shares, plan.along(SAME_LOSS))

    def exchanged(self, block: Block, plan: Plan, samples: float) -> float:
        """Seconds to send rows to experts and back."""
        if plan.ep == 1 or not block.routed:
            return 0.0
        size = block.routed * samples / plan.cp / self.thin(plan) * item(plan)
        choices = max(p.rows for p in block.products if p.experts) / min(p.rows for p in block.products)
        stride = 1 if self.thin(plan) > 1 else plan.along(SAME_LOSS)
        if plan.token_dispatcher == "allgather":
            size *= plan.ep / choices
            return self.machine.all_gather(size, plan.ep, stride) + self.machine.reduce_scatter(size, plan.ep, stride)
        if not self.software.portable:  # a row goes once to a node, and on one node to a rank, whatever number of its experts are there
            nodes = -(-plan.ep * stride // self.machine.devices_per_node)
            places = nodes if nodes > 1 else plan.ep
            size *= places * (1 - (1 - 1 / places) ** choices) / choices
        return 2 * self.machine.all_to_all(size, plan.ep, stride)

    def rotated(self, block: Block, plan: Plan, samples: float, attention: float) -> float:
        """Seconds of messages of cp that attention does not hide."""
        if plan.cp == 1 or not block.keys:
            return 0.0
        if plan.cp_method == "ulysses":
            size = (block.keys + 2 * block.out) * samples / plan.cp / plan.tp * item(plan)
            return self.machine.all_to_all(size, plan.cp, plan.tp)
        size = block.keys * samples / plan.cp / plan.tp * item(plan)
        hops = (plan.cp - 1) * self.machine.send(size, plan.tp)
        made = max((p.rows * min(p.inner, p.columns) * p.batch for p in block.products if p.fused), default=0.0)
        merging = (plan.cp - 1) / plan.cp * MERGED * made * samples / plan.tp * item(plan) / self.stream
        return self.exposed(hops, attention) + merging


def weights(block: Block, plan: Plan) -> float:
    """Elements of one block's weights on one rank, before fsdp."""
    again = sum(p.inner * (p.columns_of(plan.tp) - p.columns / plan.tp) for p in block.products if p.head)
    return block.weights_cut / plan.tp + again + block.weights - block.weights_cut + block.experts / plan.ep


def sharded(block: Block, plan: Plan) -> float:
    """The same after it. Experts are shared between those ranks of `fsdp` only that `ep` leaves with the same ones."""
    experts = block.experts / plan.ep
    return (weights(block, plan) - experts) / plan.shards + experts / plan.expert_shards


@dataclass(frozen=True)
class BlockSize:
    """Of one block on one rank: elements of its weights, and of what a sharded plan leaves of them; elements that are gathered of it; bytes
    that it keeps of a micro-batch, and that its recomputation needs for a moment."""

    weights: float
    sharded: float
    gathered: float
    kept: float
    moment: float

    @staticmethod
    def of(block: Block, plan: Plan, samples: float, software: Software) -> "BlockSize":
        own = weights(block, plan)
        unsharded = 0.0 if plan.expert_shards > 1 else block.experts / plan.ep  # a rank has these experts already: they are not gathered
        spread, scale = plan.tp if plan.stretched else 1, samples / plan.cp * item(plan)
        kept = (block.kept_cut / plan.tp + (block.kept - block.kept_cut) / spread) * scale
        kept += (met(plan) - 1) * sum(p.rows * p.inner * p.times for p in block.products if p.experts) * scale
        if plan.precision == "fp8" and not software.portable:
            kept *= EIGHT_BIT
        moment = 0.0
        if plan.activation_checkpointing == "full" and block.count > 1:
            kept, moment = block.given / spread * scale, kept
        elif plan.activation_checkpointing == "selective":
            kept -= block.kept_selective / plan.tp * scale
        return BlockSize(own, sharded(block, plan), own - unsharded, kept, moment)


EIGHT_BIT = 0.85
"""Of what is kept, where inputs of 8-bit matmuls are kept in 8 bits. torch keeps them in 16."""


def states(zero: int, offload: str, software: Software, own: float, parts: float) -> dict[str, float]:
    """Bytes that a device keeps from step to step, of a rank that computes with `own` elements of weights and has `parts` of them after fsdp.
    `zero`: as of the plan, 0 if nothing is sharded."""
    away = offload == "all"
    return {
        "parameters": ((0.0 if away else parts) if zero == 3 else own) * software.weights,
        "gradients": 0.0 if away else (parts if zero >= 2 else own) * software.gradients,
        "optimizer": 0.0 if offload != "none" else (parts if zero else own) * software.state,
    }
