"""Builds workloads of image networks from their layers, for rows that name one.

A convolution is a matrix product. Its rows are pixels, and its inner dimension is the window times the channels. In 32 bits,
without tensor cores, windows of three and five with stride one need fewer operations than their product (Winograd's minimal
filters, for squares of four pixels: Lavin and Gray, arXiv 1509.09308).
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import ceil

from shapes import Shape, attention, dense, join, known, pixels, transformer

from plait.planner.workload import Block, PlannedProduct, Workload


@dataclass(frozen=True)
class Layer:
    """A convolution to [out, side, side], or a matrix (`side` 1), with the pointwise operators on its result."""

    inside: int
    out: int
    window: tuple[int, int]
    side: int
    step: int = 1
    moved: float = 5.0
    """Elements that pointwise operators read and write per element of the result: statistics, norm and ReLU."""
    kernels: int = 3
    groups: int = 1
    """The groups of channels. With one group per channel, the input is read once more, and so is the weights' gradient."""
    linear: bool = False
    """Whether it is a matmul over channels that are contiguous in memory."""

    def block(self, filters: bool, scale: float = 1.0) -> Block:
        """Return a block. Its backward needs its input and its result before the norm. `filters`: use minimal filters; `scale`: the factor of
        its side."""
        high, wide = self.window
        minimal = filters and high == wide and high in (3, 5) and self.step == 1 and self.groups == 1
        fast = (4 * high / (high + 3)) ** 2 if minimal else 1.0
        side = ceil(self.side * scale) if self.side > 1 else 1
        inner = high * wide * self.inside / self.groups
        elements, weights = side**2 * self.out, inner * self.out
        product = PlannedProduct(side**2, inner / fast, self.out, sequence=False, convolution=self.side > 1 and not self.linear)
        return Block("layer", 1, (product,), weights, moved=self.moved * elements, kept=2.0 * elements, inputs=elements,
                     out=elements, kernels=self.kernels)  # fmt: skip


def square(inside: int, out: int, window: int, side: int, step: int = 1, **more: float) -> Layer:
    """Return a convolution with a square window."""
    return replace(Layer(inside, out, (window, window), side, step), **more)


PLAIN = {"moved": 4.0, "kernels": 2}
"""The settings of a layer without a norm: a bias and ReLU."""


def residual(*depths: int, bottleneck: bool = True, wide: int = 1, groups: int = 1) -> Iterator[Layer]:
    """ResNet of bottlenecks or of pairs of convolutions (He et al., arXiv 1512.03385); wider bottlenecks (Zagoruyko and Komodakis,
    arXiv 1605.07146), and grouped bottlenecks (Xie et al., arXiv 1611.05431)."""
    yield square(3, 64, 7, 112, 2, moved=7.0)  # and a pool
    inside, side = 64, 56
    for stage, depth in enumerate(depths):
        width = 64 << stage
        out = 4 * width if bottleneck else width
        for unit in range(depth):
            step = 2 if stage and not unit else 1
            side //= step
            if inside != out:
                yield square(inside, out, 1, side, step, moved=3.0, kernels=1)
            if bottleneck:
                yield square(inside, width * wide, 1, side, step)
                yield square(width * wide, width * wide, 3, side, groups=groups)
                yield square(width * wide, out, 1, side, moved=8.0, kernels=4)  # and a sum
            else:
                yield square(inside, out, 3, side, step)
                yield square(out, out, 3, side, moved=8.0, kernels=4)
            inside = out
    yield square(inside, 1000, 1, 1)


def stacked() -> Iterator[Layer]:
    """VGG16 (Simonyan and Zisserman, arXiv 1409.1556)."""
    inside, side = 3, 224
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for at in range(depth):
            yield square(inside, width, 3, side, moved=4.0 + 1.25 * (at == depth - 1), kernels=2)
            inside = width
        side //= 2
    yield from (square(a, b, 1, 1, **PLAIN) for a, b in ((25088, 4096), (4096, 4096), (4096, 1000)))


def first() -> Iterator[Layer]:
    """AlexNet, the version for a single device (Krizhevsky, arXiv 1404.5997)."""
    yield square(3, 64, 11, 55, 4, moved=5.25, kernels=3)
    yield square(64, 192, 5, 27, moved=5.25, kernels=3)
    yield from (square(a, b, 3, 13, **PLAIN) for a, b in ((192, 384), (384, 384), (384, 256)))
    yield from (square(a, b, 1, 1, **PLAIN) for a, b in ((9216, 4096), (4096, 4096), (4096, 1000)))


def branched() -> Iterator[Layer]:
    """Inception v3 (Szegedy et al., arXiv 1512.00567): parallel chains of (channels, window)."""
    yield from (square(3, 32, 3, 149, 2), square(32, 32, 3, 147), square(32, 64, 3, 147, moved=6.25))
    yield from (square(64, 80, 1, 73), square(80, 192, 3, 71, moved=6.25))
    inside = 192
    for pooled in (32, 64, 64):
        yield from chains(inside, 35, "64x1", "48x1 64x5", "64x1 96x3 96x3", f"{pooled}x1")
        inside = 224 + pooled
    yield from chains(inside, 17, "384x3/2", "64x1* 96x3* 96x3/2")
    for w in (128, 160, 160, 192):
        yield from chains(768, 17, "192x1", f"{w}x1 {w}x1,7 192x7,1", f"{w}x1 {w}x7,1 {w}x1,7 {w}x7,1 192x1,7", "192x1")
    yield from chains(768, 8, "192x1* 320x3/2", "192x1* 192x1,7* 192x7,1* 192x3/2")
    for inside in (1280, 2048):
        yield from chains(inside, 8, "320x1", "384x1 384x1,3", "448x1 384x3 384x1,3", "192x1")
        yield from chains(384, 8, "384x3,1", "384x3,1")
    yield square(2048, 1000, 1, 1)


def chains(inside: int, side: int, *rows: str) -> Iterator[Layer]:
    """Convolutions `channels x window`; the last one of a chain is concatenated with those of the others. `*`: before the side is halved."""
    for row in rows:
        before, last = inside, row.split()[-1]
        for one in row.split():
            out, high, wide = re.findall(r"\d+", one.split("/")[0] + (",0" if "," not in one else ""))
            window = (int(high), int(wide) or int(high))
            step = 2 if "/2" in one else 1
            at = 2 * side + 1 if "*" in one else side
            yield Layer(before, int(out), window, at, step, 7.0 if one is last else 5.0)
            before = int(out)


MOBILE = ((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 32, 3, 2, 3), (6, 64, 4, 2, 3), (6, 96, 3, 1, 3), (6, 160, 3, 2, 3), (6, 320, 1, 1, 3))
"""Of MobileNetV2 (Sandler et al., arXiv 1801.04381): expansion factor, channels, repeats, stride, window."""
EFFICIENT = ((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5), (6, 192, 4, 2, 5), (6, 320, 1, 1, 3))
"""Of EfficientNet-B0 (Tan and Le, arXiv 1905.11946): the same values."""
APART = {"moved": 9.0, "kernels": 4}
"""The settings of a depthwise convolution, which reads its input and weights' gradient once more."""


def inverted(stages: tuple[tuple[int, ...], ...], width: float = 1.0, depth: float = 1.0, squeezed: bool = False) -> Iterator[Layer]:
    """Inverted bottlenecks around depthwise convolutions."""
    inside, side = 8 * round(32 * width / 8), 112
    yield square(3, inside, 3, side, 2)
    for wider, channels, repeats, step, window in stages:
        out = 8 * round(channels * width / 8)
        for unit in range(ceil(repeats * depth)):
            if wider > 1:
                yield square(inside, wider * inside, 1, side, moved=6.0)
            side //= 1 if unit else step
            more = {"moved": 12.0, "kernels": 9} if squeezed else APART
            yield square(wider * inside, wider * inside, window, side, 1 if unit else step, groups=wider * inside, **more)
            if squeezed:  # two small matrices compute the scale of each channel from the channels' means
                yield from (square(wider * inside, inside // 4, 1, 1), square(inside // 4, wider * inside, 1, 1))
            yield square(wider * inside, out, 1, side, moved=6.0)
            inside = out
    yield square(inside, int(1280 * max(1.0, width)), 1, side, moved=6.0)
    yield square(int(1280 * max(1.0, width)), 1000, 1, 1)


def chained(*depths: int) -> Iterator[Layer]:
    """DenseNet with 32 more channels per layer (Huang et al., arXiv 1608.06993): norms read all previous channels."""
    yield square(3, 64, 7, 112, 2, moved=7.0)
    inside, side = 64, 56
    for stage, depth in enumerate(depths):
        for _ in range(depth):
            yield square(inside, 128, 1, side, moved=5.0 + 6.0 * inside / 128, kernels=6)
            yield square(128, 32, 3, side, moved=5.0)
            inside += 32
        if stage + 1 < len(depths):
            yield square(inside, inside // 2, 1, side, moved=8.0)
            inside, side = inside // 2, side // 2
    yield square(inside, 1000, 1, 1)


def modern(width: int, *depths: int) -> Iterator[Layer]:
    """ConvNeXt (Liu et al., arXiv 2201.03545)."""
    yield square(3, width, 4, 56, 4, linear=True)
    side = 56
    for stage, depth in enumerate(depths):
        wide = width << stage
        if stage:
            side //= 2
            yield square(wide // 2, wide, 2, side, 2)
        for _ in range(depth):
            yield square(wide, wide, 7, side, groups=wide, **APART)
            yield square(wide, 4 * wide, 1, side, moved=3.0, kernels=2, linear=True)
            yield square(4 * wide, wide, 1, side, moved=8.0, kernels=4, linear=True)
    yield square(width << 3, 1000, 1, 1)


def shifted(width: int, *depths: int) -> Iterator[Layer | Block]:
    """Swin (Liu et al., arXiv 2103.14030): attention in windows of 7 x 7, with rolls and window partitions, and without a fused kernel."""
    yield square(3, width, 4, 56, 4, linear=True)
    for stage, depth in enumerate(depths):
        wide, tokens = width << stage, (56 >> stage) ** 2
        if stage:
            yield square(2 * wide, wide, 1, 56 >> stage, linear=True)
        shape = Shape(1, wide, 4 * wide, wide // 32, wide // 32, head=32, window=49 / tokens, causal=False)
        rolled = Block("rolled", moved=8.0 * tokens * wide, kept=0.0, inputs=tokens * wide, out=tokens * wide, kernels=8)
        yield join("windows", depth, attention(shape, tokens, False), rolled, dense(shape, tokens, shape.ffn, True))
    yield square(width << 3, 1000, 1, 1)


@dataclass(frozen=True)
class Denoiser:
    """A U-Net of latent diffusion (Rombach et al., arXiv 2112.10752; Podell et al., arXiv 2307.01952)."""

    widths: tuple[int, ...]
    depths: tuple[int, ...]
    """The number of transformer blocks after each pair of convolutions, by level."""
    side: int
    """The pixels of a side of the latent image."""
    context: int
    """The width of the text's 77 tokens."""
    head: int = 64

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks down, middle and up."""
        inside, side, skips = self.widths[0], self.side, [self.widths[0]]
        yield square(4, inside, 3, side).block(False)
        for level, (width, depth) in enumerate(zip(self.widths, self.depths)):
            for _ in range(2):
                yield from self.pair(inside, width, side, depth)
                inside = width
                skips.append(width)
            if level + 1 < len(self.widths):
                side //= 2
                yield square(width, width, 3, side, 2).block(False)
                skips.append(width)
        yield from self.pair(inside, inside, side, max(1, self.depths[-1]))
        yield from self.pair(inside, inside, side, 0)
        for level in reversed(range(len(self.widths))):
            for _ in range(3):
                yield from self.pair(inside + skips.pop(), self.widths[level], side, self.depths[level])
                inside = self.widths[level]
            if level:
                side *= 2
                yield square(inside, inside, 3, side).block(False)
        yield square(inside, 4, 3, self.side).block(False)

    def pair(self, inside: int, width: int, side: int, depth: int) -> Iterator[Block]:
        """Two convolutions with a residual connection, and transformer blocks on their result."""
        yield square(inside, width, 3, side, moved=9.0, kernels=5).block(False)
        yield square(width, width, 3, side, moved=11.0, kernels=7).block(False)
        if inside != width:
            yield square(inside, width, 1, side, moved=3.0, kernels=1).block(False)
        if depth:
            tokens, heads = side**2, max(1, width // self.head)
            shape = Shape(1, width, 4 * width, heads, heads, gated=True, head=width // heads, causal=False)
            text = Block("text", products=(
                PlannedProduct(tokens, width, width), PlannedProduct(77, self.context, 2 * width), PlannedProduct(tokens, width, width),
                PlannedProduct(tokens, shape.head, 77, heads, weight=False, fused=True, grows="batch"),
                PlannedProduct(tokens, 77, shape.head, heads, weight=False, fused=True, grows="batch"),
            ), weights=2 * width**2 + 2 * self.context * width, moved=14.0 * tokens * width, kept=4.5 * tokens * width, inputs=tokens * width,
                out=tokens * width, kernels=14)  # fmt: skip
            yield join("attention", depth, attention(shape, tokens, True), text, dense(shape, tokens, shape.ffn, True))


Layers = Iterator[Layer] | Iterator[Layer | Block]
NETS: dict[str, Callable[[], Layers]] = {
    "resnet18": lambda: residual(2, 2, 2, 2, bottleneck=False), "resnet34": lambda: residual(3, 4, 6, 3, bottleneck=False),
    "resnet50": lambda: residual(3, 4, 6, 3), "resnet101": lambda: residual(3, 4, 23, 3),
    "resnet152": lambda: residual(3, 8, 36, 3), "inceptionv3": branched, "vgg16": stacked, "alexnet": first,
    "wideresnet50": lambda: residual(3, 4, 6, 3, wide=2), "wideresnet101": lambda: residual(3, 4, 23, 3, wide=2),
    "resnext50": lambda: residual(3, 4, 6, 3, wide=2, groups=32), "resnext10132x8": lambda: residual(3, 4, 23, 3, wide=4, groups=32),
    "resnext101": lambda: residual(3, 4, 23, 3, wide=2, groups=32), "mobilenetv2": lambda: inverted(MOBILE),
    "densenet121": lambda: chained(6, 12, 24, 16), "densenet169": lambda: chained(6, 12, 32, 32), "densenet201": lambda: chained(6, 12, 48, 32),
    **{f"efficientnetb{i}": partial(inverted, EFFICIENT, w, d, True) for i, (w, d) in enumerate((
        (1.0, 1.0), (1.0, 1.1), (1.1, 1.2), (1.2, 1.4), (1.4, 1.8), (1.6, 2.2), (1.8, 2.6), (2.0, 3.1)))},
    **{f"convnext{size}": partial(modern, w, 3, 3, deep, 3) for size, w, deep in (
        ("t", 96, 9), ("s", 96, 27), ("b", 128, 27), ("l", 192, 27), ("xl", 256, 27))},
    **{f"swin{size}": partial(shifted, w, 2, 2, deep, 2) for size, w, deep in (("t", 96, 6), ("s", 96, 18), ("b", 128, 18), ("l", 192, 18))},
}  # fmt: skip
PRINTED = {"efficientnetb1": 240, "efficientnetb2": 260, "efficientnetb3": 300, "efficientnetb4": 380, "efficientnetb5": 456, "efficientnetb6": 528,
           "efficientnetb7": 600}  # fmt: skip
"""The pixels of a side in the paper's training, if it is not 224."""
DENOISERS = (
    (r"sdxl|stablediffusionxl", Denoiser((320, 640, 1280), (0, 2, 10), 128, 2048)),
    (r"(stablediffusion|^sd)v?2.*768", Denoiser((320, 640, 1280, 1280), (1, 1, 1, 0), 96, 1024)),
    (r"(stablediffusion|^sd)v?2", Denoiser((320, 640, 1280, 1280), (1, 1, 1, 0), 64, 1024)),
    (r"(stablediffusion|^sd)(v?1|$)|latentdiffusion|^stablediffusion(?!3|v3|v?35)", Denoiser((320, 640, 1280, 1280), (1, 1, 1, 0), 64, 768, 40)),
)
AHEAD = r"latents? (are )?(pre|cache)|pre-?(comput|encod|cach)|cached|unet only|U-Net only|MLPerf|NeMo"
"""Words of a row whose images are encoded before training."""


def encoder(side: int) -> Iterator[Block]:
    """The image encoder for a latent of `side` pixels (Rombach et al., arXiv 2112.10752), forward only: a third of the cost of training."""
    inside = 128
    for width, scale in ((128, 8), (256, 4), (512, 2), (512, 1)):
        for _ in range(2):
            for a in (inside, width):
                block = square(a, width, 3, side * scale, moved=7.0, kernels=5).block(False)
                yield replace(block, weights=0.0, moved=block.moved / 3, kept=0.0, products=tuple(replace(p, times=1 / 3) for p in block.products))
            inside = width


def towers(model: str, text: str) -> Workload | None:
    """CLIP (Radford et al., arXiv 2103.00020): an image's tokens through one transformer, 77 text tokens through another."""
    image = known(model, text)
    if image is None:
        return None
    wide = {192: 256, 384: 384, 768: 512, 1024: 768}.get(image.hidden, 1024)
    words = Shape(24 if wide == 1024 else 12, wide, 4 * wide, wide // 64, vocab=49408, predicted=1 / 77, causal=False)
    pairs = [transformer(shape, length, flash=True).blocks for shape, length in ((image, image.length), (words, 77))]
    return Workload(model, tuple(block for blocks in pairs for block in blocks))


def convolutional(model: str, filters: bool, text: str = "") -> Workload | None:
    """Return the workload of an image network, or None if the name is unknown. One sample is an image; `text`: other text of the row."""
    plain = re.sub(r"[^a-z0-9]", "", re.sub(r" v\d+(\.\d+)?$", "", model.lower()))  # "ResNet-50 v1.5"
    whole = re.sub(r"[^a-z0-9]", "", model.lower())
    short = re.sub(r"(tiny|small|base|large)(?=$|patch|window|22|38|in)", lambda found: found[0][0], whole)
    names = [name for name in NETS if plain.startswith(name) or short.startswith(name)]
    if names:
        name = max(names, key=len)
        scale = pixels(f"{model} {text}", PRINTED.get(name, 224)) / 224
        return Workload(model, tuple(one.block(filters, scale) if isinstance(one, Layer) else one for one in NETS[name]()))
    if "clip" in whole:
        return towers(model, text)
    denoiser = next((one for words, one in DENOISERS if re.search(words, whole)), None)
    if denoiser is None:
        return None
    denoiser = replace(denoiser, side=pixels(f"{model} {text}", 8 * denoiser.side) // 8)
    ahead = () if re.search(AHEAD, text) else encoder(denoiser.side)
    return Workload(model, (*ahead, *denoiser.blocks()))
