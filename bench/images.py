"""Image networks as workloads, from their layers: for rows that name one.

A convolution is a product: its rows are pixels, its inner dim the window times the channels. In 32 bits, without tensor
cores, windows of three and five that move by one take fewer operations than they have (Winograd's minimal filters, for
squares of four pixels: Lavin and Gray, arXiv 1509.09308).
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from shapes import Shape, attention, dense, join

from plait.planner.from_sketch import Block, PlannedProduct, Workload


@dataclass(frozen=True)
class Layer:
    """A convolution to [out, side, side], or a matrix (`side` 1), with what is done to its result."""

    inside: int
    out: int
    window: tuple[int, int]
    side: int
    step: int = 1
    moved: float = 5.0
    """What pointwise operators read and write of an element of its result: statistics, norm and ReLU."""
    kernels: int = 3

    def block(self, filters: bool) -> Block:
        """As a block: what its backward needs is its input and its result before the norm. `filters`: minimal ones are used."""
        high, wide = self.window
        minimal = filters and high == wide and high in (3, 5) and self.step == 1
        fast = (4 * high / (high + 3)) ** 2 if minimal else 1.0
        elements, weights = self.side**2 * self.out, high * wide * self.inside * self.out
        product = PlannedProduct(self.side**2, high * wide * self.inside / fast, self.out, sequence=False, convolution=self.side > 1)
        return Block("layer", 1, (product,), weights, moved=self.moved * elements, kept=2.0 * elements, given=elements,
                     out=elements, kernels=self.kernels)  # fmt: skip


def square(inside: int, out: int, window: int, side: int, step: int = 1, **more: float) -> Layer:
    """With a square window."""
    return replace(Layer(inside, out, (window, window), side, step), **more)


PLAIN = {"moved": 4.0, "kernels": 2}
"""Without a norm: a bias and ReLU."""


def residual(*depths: int) -> Iterator[Layer]:
    """ResNet of bottlenecks (He et al., arXiv 1512.03385)."""
    yield square(3, 64, 7, 112, 2, moved=7.0)  # and a pool
    inside, side = 64, 56
    for stage, depth in enumerate(depths):
        width = 64 << stage
        for unit in range(depth):
            step = 2 if stage and not unit else 1
            side //= step
            if not unit:
                yield square(inside, 4 * width, 1, side, step, moved=3.0, kernels=1)
            yield square(inside, width, 1, side, step)
            yield square(width, width, 3, side)
            yield square(width, 4 * width, 1, side, moved=8.0, kernels=4)  # and a sum
            inside = 4 * width
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
    """AlexNet, the one of a single device (Krizhevsky, arXiv 1404.5997)."""
    yield square(3, 64, 11, 55, 4, moved=5.25, kernels=3)
    yield square(64, 192, 5, 27, moved=5.25, kernels=3)
    yield from (square(a, b, 3, 13, **PLAIN) for a, b in ((192, 384), (384, 384), (384, 256)))
    yield from (square(a, b, 1, 1, **PLAIN) for a, b in ((9216, 4096), (4096, 4096), (4096, 1000)))


def branched() -> Iterator[Layer]:
    """Inception v3 (Szegedy et al., arXiv 1512.00567): chains of (channels, window) beside each other."""
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
    """Convolutions `channels x window`, the last of a chain joined to the others'; `*`: before the side is halved."""
    for row in rows:
        before, last = inside, row.split()[-1]
        for one in row.split():
            out, high, wide = re.findall(r"\d+", one.split("/")[0] + (",0" if "," not in one else ""))
            window = (int(high), int(wide) or int(high))
            step = 2 if "/2" in one else 1
            at = 2 * side + 1 if "*" in one else side
            yield Layer(before, int(out), window, at, step, 7.0 if one is last else 5.0)
            before = int(out)


@dataclass(frozen=True)
class Denoiser:
    """A U-Net of latent diffusion (Rombach et al., arXiv 2112.10752; Podell et al., arXiv 2307.01952)."""

    widths: tuple[int, ...]
    depths: tuple[int, ...]
    """Transformer blocks after each pair of convolutions, by level."""
    side: int
    """Pixels of the latent image."""
    context: int
    """Width of the text's 77 words."""
    head: int = 64

    def blocks(self) -> Iterator[Block]:
        """Down, middle and up."""
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
        """Two convolutions around which the input is added, and transformer blocks on their result."""
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
            ), weights=2 * width**2 + 2 * self.context * width, moved=14.0 * tokens * width, kept=4.5 * tokens * width, given=tokens * width,
                out=tokens * width, kernels=14)  # fmt: skip
            yield join("attention", depth, attention(shape, tokens, True), text, dense(shape, tokens, shape.ffn, True))


NETS: dict[str, Callable[[], Iterator[Layer]]] = {
    "resnet50": lambda: residual(3, 4, 6, 3), "resnet101": lambda: residual(3, 4, 23, 3),
    "resnet152": lambda: residual(3, 8, 36, 3), "inceptionv3": branched, "vgg16": stacked, "alexnet": first,
}  # fmt: skip
DENOISERS = (
    (r"sdxl|stablediffusionxl", Denoiser((320, 640, 1280), (0, 2, 10), 128, 2048)),
    (r"(stablediffusion|^sd)v?2.*768", Denoiser((320, 640, 1280, 1280), (1, 1, 1, 0), 96, 1024)),
    (r"(stablediffusion|^sd)v?2", Denoiser((320, 640, 1280, 1280), (1, 1, 1, 0), 64, 1024)),
    (r"(stablediffusion|^sd)(v?1|$)|latentdiffusion", Denoiser((320, 640, 1280, 1280), (1, 1, 1, 0), 64, 768, 40)),
)


def convolutional(model: str, filters: bool) -> Workload | None:
    """The workload of an image network; None when it is not a known one. One sample is an image."""
    plain = re.sub(r"[^a-z0-9]", "", re.sub(r" v\d+(\.\d+)?$", "", model.lower()))  # "ResNet-50 v1.5"
    whole = re.sub(r"[^a-z0-9]", "", model.lower())
    if found := NETS.get(plain) or NETS.get(whole):
        return Workload(model, tuple(layer.block(filters) for layer in found()))
    denoiser = next((one for words, one in DENOISERS if re.search(words, whole)), None)
    return Workload(model, tuple(denoiser.blocks())) if denoiser else None
