"""Shapes of published models, and the workload of a transformer of a shape, for rows without code.

`plait plan` takes a workload from the sketch of a real module, but a published run only names a model. `SHAPES` are the public
configurations of models that sources name without their sizes.
"""

import re
from dataclasses import dataclass, replace

from plait.planner.workload import Block, PlannedProduct, Workload


@dataclass(frozen=True)
class Shape:
    """A transformer. Zero means the usual value (`ffn` 4 x hidden, `kv` heads, `head` hidden / heads)."""

    layers: int
    hidden: int
    ffn: int = 0
    heads: int = 0
    kv: int = 0
    vocab: int = 51200
    gated: bool = False
    head: int = 0
    experts: int = 0
    """The experts of a layer, each gated and `expert_ffn` wide; `active` of them process each token."""
    active: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    """The width of the shared expert, which processes every token."""
    dense: int = 0
    """The number of first layers without experts, `ffn` wide."""
    latent: tuple[int, int] = (0, 0)
    """The ranks of the compressed queries and of the keys and values (multi-head latent attention)."""
    attentions: int = -1
    """The number of layers with attention; the others mix the sequence with a state space of width `state`."""
    state: int = 0
    window: float = 1.0
    """The average fraction of the keys that a query attends to, if attention slides in some layers."""
    tied: bool = True
    predicted: float = 1.0
    """The fraction of the tokens that the head computes (masked language models)."""
    inner: int = 0
    """The input width of experts, if the hidden state is projected to it first."""
    length: int = 2048
    """The tokens of a sequence, if a run does not state them."""
    causal: bool = True
    more: float = 0.0
    """Weights in addition to these layers, such as those of a second stream, in 10^9."""


DEEPSEEK = Shape(61, 7168, 18432, 128, 128, 129280, True, 192, 256, 8, 2048, 2048, 3, (1536, 512), tied=False)
SHAPES = {
    "llama3.1405b": Shape(126, 16384, 53248, 128, 8, 128256, True, tied=False, length=8192),
    "llama370b": Shape(80, 8192, 28672, 64, 8, 128256, True, tied=False, length=8192),
    "llama3.170b": Shape(80, 8192, 28672, 64, 8, 128256, True, tied=False, length=8192),
    "llama38b": Shape(32, 4096, 14336, 32, 8, 128256, True, tied=False, length=8192),
    "llama3.18b": Shape(32, 4096, 14336, 32, 8, 128256, True, tied=False, length=8192),
    "llama27b": Shape(32, 4096, 11008, 32, 32, 32000, True, tied=False),
    "llama213b": Shape(40, 5120, 13824, 40, 40, 32000, True, tied=False),
    "llama270b": Shape(80, 8192, 28672, 64, 8, 32000, True, tied=False),
    "internlm7b": Shape(32, 4096, 11008, 32, 32, 103168, True, tied=False),
    "internlm20b": Shape(60, 5120, 13824, 40, 40, 103168, True, tied=False),
    "gptoss120b": Shape(36, 2880, 2880, 64, 8, 201088, True, 64, 128, 4, 2880, window=0.55, tied=False),
    "gptoss20b": Shape(24, 2880, 2880, 64, 8, 201088, True, 64, 32, 4, 2880, window=0.55, tied=False),
    "qwen330ba3b": Shape(48, 2048, 6144, 32, 4, 151936, True, 128, 128, 8, 768, tied=False),
    "qwen3235ba22b": Shape(94, 4096, 12288, 64, 4, 151936, True, 128, 128, 8, 1536, tied=False),
    "mixtral8x7b": Shape(32, 4096, 14336, 32, 8, 32000, True, 0, 8, 2, 14336, tied=False),
    "mixtral8x22b": Shape(56, 6144, 16384, 48, 8, 32768, True, 0, 8, 2, 16384, tied=False),
    "deepseekv3": DEEPSEEK,
    "deepseekv2": Shape(60, 5120, 12288, 128, 128, 102400, True, 192, 160, 6, 1536, 3072, 1, (1536, 512), tied=False),
    "kimik2": replace(DEEPSEEK, heads=64, kv=64, vocab=163840, experts=384, dense=1),
    "nemotron3nano": Shape(52, 2688, 1856, 32, 2, 131072, False, 128, 128, 6, 1856, 3712, 0, attentions=6, state=4096, tied=False),
    "nemotron3super": Shape(88, 4096, 2688, 32, 2, 131072, False, 128, 512, 22, 2688, 5376, 0, attentions=8, state=8192, tied=False, inner=1024),
    "nemotron8b": Shape(32, 4096, 16384, 32, 32, 256000, tied=False),
    "nemotron22b": Shape(40, 6144, 24576, 48, 48, 256000, tied=False),
    "nemotron340b": Shape(96, 18432, 73728, 96, 8, 256000, tied=False),
    "gpt35b": Shape(24, 4096, 16384, 32, 32, 51200),
    "gpt320b": Shape(44, 6144, 24576, 48, 48, 51200),
    "gpt3175b": Shape(96, 12288, 49152, 96, 96, 51200),
    "opt175b": Shape(96, 12288, 49152, 96, 96, 50272),
    **{f"opt{size}": Shape(n, h, 4 * h, a, a, 50272) for size, n, h, a in (
        ("1.3b", 24, 2048, 32), ("2.7b", 32, 2560, 32), ("6.7b", 32, 4096, 32), ("13b", 40, 5120, 40), ("30b", 48, 7168, 56),
        ("66b", 64, 9216, 72))},
    **{f"llama{size}": Shape(n, h, f, a, a, 32000, True, tied=False) for size, n, h, f, a in (
        ("7b", 32, 4096, 11008, 32), ("13b", 40, 5120, 13824, 40), ("30b", 60, 6656, 17920, 52), ("33b", 60, 6656, 17920, 52),
        ("65b", 80, 8192, 22016, 64))},
    **{f"qwen2.5{size}": Shape(n, h, f, a, kv, 152064, True, tied=False, length=4096) for size, n, h, f, a, kv in (
        ("7b", 28, 3584, 18944, 28, 4), ("14b", 48, 5120, 13824, 40, 8), ("32b", 64, 5120, 27648, 40, 8), ("72b", 80, 8192, 29568, 64, 8))},
    **{f"qwen3{size}": Shape(n, h, f, a, 8, 151936, True, 128, tied=False, length=4096) for size, n, h, f, a in (
        ("8b", 36, 4096, 12288, 32), ("14b", 40, 5120, 17408, 40), ("32b", 64, 5120, 25600, 64))},
    "llama3.21b": Shape(16, 2048, 8192, 32, 8, 128256, True, 64, length=8192),
    "llama3.23b": Shape(28, 3072, 8192, 24, 8, 128256, True, 128, length=8192),
    "mistral7b": Shape(32, 4096, 14336, 32, 8, 32000, True, tied=False, length=8192),
    "gemma7b": Shape(28, 3072, 24576, 16, 16, 256000, True, 256, length=8192),
    "phi3mini": Shape(32, 3072, 8192, 32, 32, 32064, True, tied=False, length=4096),
    "falcon7b": Shape(32, 4544, 18176, 71, 1, 65024), "falcon40b": Shape(60, 8192, 32768, 128, 8, 65024),
    "bloom176b": Shape(70, 14336, 57344, 112, 112, 250880), "gptneox20b": Shape(44, 6144, 24576, 64, 64, 50432, tied=False),
    "gptj6b": Shape(28, 4096, 16384, 16, 16, 50400, tied=False), "mtnlg": Shape(105, 20480, 81920, 128, 128, 51200),
    "gpt2medium": Shape(24, 1024, 4096, 16, 16, 50257, length=1024), "gpt2large": Shape(36, 1280, 5120, 20, 20, 50257, length=1024),
    "gpt2xl": Shape(48, 1600, 6400, 25, 25, 50257, length=1024), "bertbase": Shape(12, 768, 3072, 12, 12, 30528, predicted=0.16, length=512),
    "bertlarge": Shape(24, 1024, 4096, 16, 16, 30528, predicted=0.16),
    "transformerbig": Shape(15, 1024, 4096, 16, 16, 33712),
    "gpt2124m": Shape(12, 768, 3072, 12, 12, 50257),
    "gpt2": Shape(12, 768, 3072, 12, 12, 50257, length=1024), "gpt2small": Shape(12, 768, 3072, 12, 12, 50257, length=1024),
    "llama3.370b": Shape(80, 8192, 28672, 64, 8, 128256, True, tied=False, length=8192),
    "llama4scout": Shape(48, 5120, 8192, 40, 8, 202048, True, 128, 16, 1, 8192, 8192, tied=False, length=8192),
    "llama4maverick": Shape(48, 5120, 16384, 40, 8, 202048, True, 128, 128, 1, 8192, 8192, 24, tied=False, length=8192),
    "tinyllama1.1b": Shape(22, 2048, 5632, 32, 4, 32000, True, tied=False),
    "codellama7b": Shape(32, 4096, 11008, 32, 32, 32016, True, tied=False, length=4096),
    "codellama34b": Shape(48, 8192, 22016, 64, 8, 32000, True, tied=False, length=4096),
    "yi6b": Shape(32, 4096, 11008, 32, 4, 64000, True, tied=False, length=4096),
    "yi34b": Shape(60, 7168, 20480, 56, 8, 64000, True, tied=False, length=4096),
    "mistralnemo12b": Shape(40, 5120, 14336, 32, 8, 131072, True, 128, tied=False, length=8192),
    "mistralsmall24b": Shape(40, 5120, 32768, 32, 8, 131072, True, 128, tied=False, length=8192),
    "mistrallarge": Shape(88, 12288, 28672, 96, 8, 32768, True, tied=False, length=8192),
    "qwen30ba3b": Shape(48, 2048, 6144, 32, 4, 151936, True, 128, 128, 8, 768, tied=False),
    "deepseekv2lite": Shape(27, 2048, 10944, 16, 16, 102400, True, 192, 64, 6, 1408, 2816, 1, (2048, 512), tied=False, length=4096),
    "olmoe1b7b": Shape(16, 2048, 1024, 16, 16, 50304, True, 128, 64, 8, 1024, tied=False, length=4096),
    "nemotron415b": Shape(32, 6144, 24576, 48, 8, 256000, tied=False, length=4096),
    "nemotron4340b": Shape(96, 18432, 73728, 96, 8, 256000, tied=False, length=4096),
    "starcoder15b": Shape(40, 6144, 24576, 48, 1, 49152, length=8192),
    "phi2": Shape(32, 2560, 10240, 32, 32, 51200, tied=False), "phi4": Shape(40, 5120, 17920, 40, 10, 100352, True, tied=False, length=4096),
    "phi3medium": Shape(40, 5120, 17920, 40, 10, 32064, True, tied=False, length=4096),
    **{f"gemma{size}": Shape(n, h, f, a, kv, v, True, d, length=length) for size, n, h, f, a, kv, v, d, length in (
        ("2b", 18, 2048, 16384, 8, 1, 256000, 256, 4096), ("22b", 26, 2304, 9216, 8, 4, 256000, 256, 4096),
        ("29b", 42, 3584, 14336, 16, 8, 256000, 256, 4096), ("227b", 46, 4608, 36864, 32, 16, 256000, 128, 4096),
        ("31b", 26, 1152, 6912, 4, 1, 262144, 256, 4096), ("34b", 34, 2560, 10240, 8, 4, 262144, 256, 4096),
        ("312b", 48, 3840, 15360, 16, 8, 262144, 256, 4096), ("327b", 62, 5376, 21504, 32, 16, 262144, 128, 4096))},
    **{f"qwen{size}": Shape(n, h, f, a, kv, 151936, True, d, tied=tied, length=4096) for size, n, h, f, a, kv, d, tied in (
        ("7b", 32, 4096, 11008, 32, 32, 0, False), ("14b", 40, 5120, 13696, 40, 40, 0, False), ("1.57b", 32, 4096, 11008, 32, 32, 0, False),
        ("27b", 28, 3584, 18944, 28, 4, 0, False), ("272b", 80, 8192, 29568, 64, 8, 0, False), ("20.5b", 24, 896, 4864, 14, 2, 0, True),
        ("21.5b", 28, 1536, 8960, 12, 2, 0, True), ("2.50.5b", 24, 896, 4864, 14, 2, 0, True), ("2.51.5b", 28, 1536, 8960, 12, 2, 0, True),
        ("2.53b", 36, 2048, 11008, 16, 2, 0, True), ("30.6b", 28, 1024, 3072, 16, 8, 128, True), ("31.7b", 28, 2048, 6144, 16, 8, 128, True),
        ("34b", 36, 2560, 9728, 32, 8, 128, True))},
    **{f"olmo{size}": Shape(n, h, f, a, kv, 100352, True, tied=False, length=4096) for size, n, h, f, a, kv in (
        ("7b", 32, 4096, 11008, 32, 32), ("27b", 32, 4096, 11008, 32, 32), ("213b", 40, 5120, 13824, 40, 40), ("232b", 64, 5120, 27648, 40, 8))},
    **{f"smollm{size}": Shape(n, h, f, a, kv, 49152, True) for size, n, h, f, a, kv in (
        ("2135m", 30, 576, 1536, 9, 3), ("2360m", 32, 960, 2560, 15, 5), ("21.7b", 24, 2048, 8192, 32, 32), ("33b", 36, 2048, 11008, 16, 4))},
    **{f"pythia{size}": Shape(n, h, 4 * h, a, a, 50304, tied=False) for size, n, h, a in (
        ("70m", 6, 512, 8), ("160m", 12, 768, 12), ("410m", 24, 1024, 16), ("1b", 16, 2048, 8), ("1.4b", 24, 2048, 16),
        ("2.8b", 32, 2560, 32), ("6.9b", 32, 4096, 32), ("12b", 36, 5120, 40))},
    **{f"bloom{size}": Shape(n, h, 4 * h, a, a, 250880) for size, n, h, a in (
        ("560m", 24, 1024, 16), ("1b7", 24, 2048, 16), ("3b", 30, 2560, 32), ("7b1", 30, 4096, 32))},
    **{f"roberta{size}": Shape(n, h, 4 * h, a, a, 50265, predicted=0.15, causal=False, length=512) for size, n, h, a in (
        ("base", 12, 768, 12), ("large", 24, 1024, 16))},
    "distilbertbase": Shape(6, 768, 3072, 12, 12, 30528, predicted=0.15, causal=False, length=512),
    "pixartalpha": Shape(28, 1152, 4608, 16, 16, 32, causal=False, length=1024),
    "pixartsigma": Shape(28, 1152, 4608, 16, 16, 32, causal=False, length=4096),
    **dict.fromkeys(("flux", "flux.1"), Shape(57, 3072, 12288, 24, 24, 64, causal=False, length=4608, more=5.4)),
    **dict.fromkeys(("sd3medium", "sd3", "stablediffusion3", "stablediffusion3medium"),
        Shape(24, 1536, 6144, 24, 24, 64, causal=False, length=4250, more=1.3)),
    **dict.fromkeys(("sd3.5large", "stablediffusion3.5large"), Shape(38, 2432, 9728, 38, 38, 64, causal=False, length=4250, more=5.3)),
    "wan2.114b": Shape(40, 5120, 13824, 40, 40, 64, causal=False, length=32760, more=4.3),
    "wan2.11.3b": Shape(30, 1536, 8960, 12, 12, 64, causal=False, length=32760, more=0.3),
    "hunyuanvideo": Shape(60, 3072, 12288, 24, 24, 64, causal=False, length=32760, more=6.0),
    "cogvideox5b": Shape(42, 3072, 12288, 48, 48, 64, causal=False, length=17776),
    "cogvideox2b": Shape(30, 1920, 7680, 30, 30, 64, causal=False, length=17776),
    "dbrx": Shape(40, 6144, 10752, 48, 8, 100352, True, 128, 16, 4, 10752, tied=False),
    "grok1": Shape(64, 6144, 32768, 48, 8, 131072, True, 128, 8, 2, 32768),
    "moonlight16ba3b": Shape(27, 2048, 11264, 16, 16, 163840, True, 192, 64, 6, 1408, 2816, 1, (2048, 512), tied=False, length=4096),
    "qwen1.5moea2.7b": Shape(24, 2048, 5632, 16, 16, 151936, True, 128, 60, 4, 1408, 5632, tied=False, length=4096),
    "qwen257ba14b": Shape(28, 3584, 18944, 28, 4, 151936, True, 128, 64, 8, 2560, 20480, tied=False, length=4096),
    "qwen3next80ba3b": Shape(48, 2048, 5120, 16, 2, 151936, True, 256, 512, 10, 512, 512, tied=False, length=4096),
    "qwen3coder30ba3b": Shape(48, 2048, 6144, 32, 4, 151936, True, 128, 128, 8, 768, tied=False, length=4096),
    "glm4.5air": Shape(46, 4096, 10944, 96, 8, 151552, True, 128, 128, 8, 1408, 1408, 1, tied=False, length=4096),
    "glm4.5": Shape(92, 5120, 12288, 96, 8, 151552, True, 128, 160, 8, 1536, 1536, 3, tied=False, length=4096),
    "glm49b": Shape(40, 4096, 13696, 32, 2, 151552, True, tied=False, length=8192),
    "chatglm36b": Shape(28, 4096, 13696, 32, 2, 65024, True, tied=False),
    "phi3.5moe": Shape(32, 4096, 6400, 32, 8, 32064, True, 128, 16, 2, 6400, tied=False, length=4096),
    "deepseekmoe16b": Shape(28, 2048, 10944, 16, 16, 102400, True, 128, 64, 6, 1408, 2816, 1, tied=False, length=4096),
    "deepseekr1": DEEPSEEK, "minimaxm2": Shape(62, 3072, 1536, 48, 8, 200064, True, 128, 256, 8, 1536, tied=False, length=4096),
    "baichuan27b": Shape(32, 4096, 11008, 32, 32, 125696, True, tied=False, length=4096),
    "baichuan213b": Shape(40, 5120, 13696, 40, 40, 125696, True, tied=False, length=4096),
    "internlm27b": Shape(32, 4096, 14336, 32, 8, 92544, True, tied=False, length=4096),
    "qwen2.57bvl": Shape(28, 3584, 18944, 28, 4, 152064, True, tied=False, length=4096),
    "qwen2.5vl7b": Shape(28, 3584, 18944, 28, 4, 152064, True, tied=False),
    "qwen2vl7b": Shape(28, 3584, 18944, 28, 4, 152064, True, tied=False), "llava1.57b": Shape(32, 4096, 11008, 32, 32, 32000, True, tied=False),
    **{f"mpt{size}": Shape(n, h, 4 * h, a, a, 50432) for size, n, h, a in (
        ("125m", 12, 768, 12), ("350m", 24, 1024, 16), ("760m", 24, 1536, 12), ("1b", 24, 2048, 16), ("3b", 32, 2560, 20), ("7b", 32, 4096, 32),
        ("13b", 40, 5120, 40), ("30b", 48, 7168, 56), ("70b", 64, 10240, 80))},
    **{f"t5{size}": Shape(n, h, f, a, a, 32128, head=64 if h < 1024 else 128 if a > 16 else 64, length=512) for size, n, h, f, a in (
        ("small", 14, 512, 2048, 8), ("base", 28, 768, 3072, 12), ("large", 56, 1024, 4096, 16), ("3b", 52, 1024, 16384, 32),
        ("11b", 50, 1024, 65536, 128))},
    **{f"nanogpt{size}": Shape(n, h, 4 * h, a, a, 50304, length=1024)
        for size, n, h, a in (("", 12, 768, 12), ("124m", 12, 768, 12), ("350m", 24, 1024, 16))},
}  # fmt: skip

VITS = {
    "ti": (12, 192, 768, 3), "s": (12, 384, 1536, 6), "b": (12, 768, 3072, 12), "l": (24, 1024, 4096, 16), "so": (27, 1152, 4304, 16),
    "h": (32, 1280, 5120, 16), "g": (40, 1408, 6144, 16), "G": (48, 1664, 8192, 16), "22b": (48, 6144, 24576, 48),
}  # fmt: skip
"""Layers, width, inner width and heads of vision transformers (arXiv 2010.11929, 2106.04560, 2302.05442)."""
DITS = {"s": (12, 384, 6), "b": (12, 768, 12), "l": (24, 1024, 16), "xl": (28, 1152, 16)}
"""Layers, width and heads of DiT and SiT (arXiv 2212.09748)."""


def pixels(text: str, usual: int) -> int:
    """Return the pixels of an image's side, if a text contains them: `512x512`, `256px`, `_384`."""
    found = re.search(r"\b(\d{3,4}) ?[x×] ?\1\b|(?<![\d.])(\d{3,4}) ?(?:px|p\b|pixels|² ?px|\^2)|_(224|256|288|320|384|448|512)\b", text)
    return int(found[1] or found[2] or found[3]) if found else usual


def visual(model: str, text: str = "") -> Shape | None:
    """Return the shape of a vision transformer, or of a latent diffusion transformer, by its size and patch."""
    said = f"{model} {text}"
    if found := re.search(r"(?i)\b[ds]it[-_ ]*(xl|s|b|l)\b[-_/ ]*([248])?", model):
        layers, wide, heads = DITS[found[1].lower()]
        tokens = (pixels(said, 256) // 8 // int(found[2] or 2)) ** 2
        return Shape(layers, wide, 4 * wide, heads, heads, 32, causal=False, length=tokens, more=6 * wide**2 * layers / 1e9)
    sizes = "tiny|ti|small|base|large|huge|giant|gigantic|bigg|so400m|22b|s|b|l|h|g"
    if found := re.search(rf"(?i)(?:vit|deit|beit|mae|dino\w*)[-_ ]*({sizes})(?![a-z])[-_/ ]*(?:patch)?(\d\d)?(?![\d])", model):
        size = found[1].lower()
        key = {"tiny": "ti", "gigantic": "G", "bigg": "G", "so400m": "so", "22b": "22b"}.get(size, size[:2] if size == "ti" else size[0])
        layers, wide, inner, heads = VITS[key]
        tokens = (pixels(said, 224) // int(found[2] or 16)) ** 2 + 1
        return Shape(layers, wide, inner, heads, heads, 1000, predicted=1 / tokens, causal=False, length=tokens)
    return None


def known(model: str, text: str = "") -> Shape | None:
    """Return the public shape of a model by its name, without words about the run; `text`: other text of the row."""
    name = re.sub(r"\(.*?\)|\b(q?[dr]?s?lora|sft|dpo|grpo|cpt"
                  r"|pretrain\w*|pre-training|instruct|chat|hf|v0\.\d|dev|schnell|fine-?tun\w*|full|4-?bit|bnb)\b|(?<=\d[bB])-it\b",
                  "", model.lower())  # fmt: skip
    plain = re.sub(r"[^a-z0-9.]", "", re.sub(r"^[\w.-]+/(?=[a-z])", "", name.strip()))
    if plain in SHAPES:
        return SHAPES[plain]
    if found := visual(model, text):
        return found
    starts = [key for key in SHAPES if plain.startswith(key) and not plain[len(key) :][:1].isdigit() and plain[len(key) :][:1] not in ("b", "m", ".")]
    return SHAPES[max(starts, key=len)] if starts else None


def usual(billions: float, gated: bool, vocab: int = 51200, hidden: int = 0) -> Shape:
    """Return a dense decoder of a given number of parameters, if only that is known. Its width is 128 times its layers, as in GPT-3's family."""
    count = billions * 1e9
    wide = hidden or 128 * max(2, round((count * 128 / 12) ** (1 / 3) / 128))
    layers = max(1, round((count - vocab * wide) / (12 * wide**2 + 13 * wide)))
    return Shape(layers, wide, 8 * wide // 3 if gated else 4 * wide, vocab=vocab, gated=gated)


def transformer(shape: Shape, tokens: int, *, flash: bool, copies: float = 4.0, name: str = "") -> Workload:
    """Return the workload. One sample is a sequence of `tokens` tokens; sizes are in elements. `copies`: the copies of the logits that the
    loss keeps. The default has the printed ones, two in 32 bits, and their gradient. A compiled loss keeps the first and the last, and
    an in-place loss keeps one."""
    shape = replace(shape, ffn=shape.ffn or 4 * shape.hidden, heads=shape.heads or max(1, shape.hidden // 128))
    shape = replace(shape, kv=shape.kv or shape.heads, head=shape.head or shape.hidden // shape.heads)
    attentions = shape.layers if shape.attentions < 0 else shape.attentions
    s, h, v = tokens, shape.hidden, shape.vocab
    blocks = [
        Block(
            "embedding", weights=v * h, weights_cut=v * h, moved=4 * s * h, inputs=s, out=s * h, kernels=6, tp_sums=1
        )
    ]
    others = shape.layers - attentions
    mixed = shape.layers - shape.dense if shape.experts else 0
    if others:  # a layer of a hybrid has one of three kinds: attention, a state space, or experts
        third = (others + attentions) // 2
        blocks += [join("state", others - third // 1 if others > third else 0, _state(shape, s))]
        blocks += [join("attention", attentions, attention(shape, s, flash))]
        blocks += [join("experts", third, _experts(shape, s))]
        blocks = [b for b in blocks if b.count]
    else:
        att = attention(shape, s, flash)
        if shape.layers - mixed:
            blocks.append(join("layer", shape.layers - mixed, att, dense(shape, s, shape.ffn, flash)))
        if mixed:
            blocks.append(join("mixture", mixed, att, _experts(shape, s)))
    rows = s * shape.predicted
    head = PlannedProduct(rows, h, v, cut="columns")
    own = (0 if shape.tied else v * h) + shape.more * 1e9
    logits = rows * v
    blocks.append(
        Block("head", products=(head,), weights=own, weights_cut=own, moved=8 * logits + 6 * s * h, moved_cut=8 * logits,
              kept=copies * logits + 2 * s * h, kept_cut=copies * logits, inputs=s * h, out=s * h, kernels=14, tp_sums=1)
    )  # fmt: skip
    return Workload(name, tuple(blocks))


def join(name: str, count: int, *parts: Block) -> Block:
    """Join several blocks in sequence to one."""
    summed = {k: sum(getattr(p, k) for p in parts) for k in (
        "weights", "weights_cut", "experts", "moved", "moved_cut", "scores", "kept", "kept_cut", "kept_selective", "kernels",
        "tp_sums", "keys", "routed")}  # fmt: skip
    products = tuple(q for p in parts for q in p.products)
    last = parts[-1]
    return Block(name, count, products, inputs=parts[0].inputs, out=last.out, **summed)


def attention(shape: Shape, s: int, flash: bool) -> Block:
    h, a, d, kv = shape.hidden, shape.heads, shape.head, shape.kv
    if shape.latent[0]:
        q, c = shape.latent
        maps = (
            PlannedProduct(s, h, q + c + 64),
            PlannedProduct(s, q, a * d, cut="columns"),
            PlannedProduct(s, c, a * 256, cut="columns"),
        )
        out, value = PlannedProduct(s, a * 128, h, cut="inner"), 128
        weights = h * (q + c + 64) + q * a * d + c * a * 256 + a * 128 * h
        wide = a * (d + 256)
    else:
        maps, value = (PlannedProduct(s, h, (a + 2 * kv) * d, cut="columns"),), d
        out = PlannedProduct(s, a * d, h, cut="inner")
        weights, wide = h * (a + 2 * kv) * d + a * d * h, (a + 2 * kv) * d
    keys, causal = s * shape.window, shape.causal and shape.predicted == 1
    scores = (PlannedProduct(s, d, keys, a, cut="batch", weight=False, fused=flash, grows="batch", causal=causal),
              PlannedProduct(s, keys, value, a, cut="batch", weight=False, fused=flash, grows="batch", causal=causal))  # fmt: skip
    square = 0 if flash else a * s * keys
    cut = s * (2 * wide + a * value)
    kept = s * (wide + a * value) + 2.5 * square
    return Block("attention", products=(*maps, *scores, out), weights=weights + 2 * h, weights_cut=weights,
                 moved=cut + 14 * s * h, moved_cut=cut, kept=kept + 2.5 * s * h, kept_cut=kept,
                 kept_selective=2.5 * square + (0.68 * kept if flash else 0), scores=5 * square,
                 inputs=s * h, out=s * h, kernels=14 if flash else 20, tp_sums=1,
                 keys=2 * s * kv * d)  # fmt: skip


def dense(shape: Shape, s: int, ffn: int, flash: bool) -> Block:
    h, wide = shape.hidden, 2 if shape.gated else 1
    up, down = PlannedProduct(s, h, ffn * wide, cut="columns"), PlannedProduct(s, ffn, h, cut="inner")
    cut = s * ffn * (wide * 2 + 1)
    kept = s * ffn * (wide + 1)
    return Block("mlp", products=(up, down), weights=h * ffn * (wide + 1) + 2 * h, weights_cut=h * ffn * (wide + 1),
                 moved=cut + 14 * s * h, moved_cut=cut, kept=kept + 2.5 * s * h, kept_cut=kept, kept_selective=0.68 * kept * flash, inputs=s * h,
                 out=s * h, kernels=12, tp_sums=1)  # fmt: skip


def _experts(shape: Shape, s: int) -> Block:
    h, f, k, e, wide = shape.hidden, shape.expert_ffn, shape.active, shape.experts, 2 if shape.gated else 1
    i = shape.inner or h
    up = PlannedProduct(s * k, i, f * wide, experts=e)
    down = PlannedProduct(s * k, f, i, experts=e)
    around = (PlannedProduct(s, h, i), PlannedProduct(s, i, h)) if shape.inner else ()
    cut = s * k * f * (wide * 2 + 1)
    routed = Block("experts", products=(PlannedProduct(s, h, e), *around, up, down), weights=h * e + 2 * h, experts=e * i * f * (wide + 1),
                   moved=cut + 14 * s * h + 6 * s * k * i + 4 * s * e, moved_cut=0,
                   kept=s * k * (f * (wide + 1) + i) + 2.5 * s * h, kept_cut=0, kept_selective=s * k * f,
                   inputs=s * h, out=s * h, kernels=30, tp_sums=0, routed=s * k * i)  # fmt: skip
    if not shape.shared_ffn:
        return routed
    both = join("experts", 1, routed, dense(shape, s, shape.shared_ffn, True))
    return replace(both, tp_sums=1)


def _state(shape: Shape, s: int) -> Block:
    h, d = shape.hidden, shape.state
    inside, out = PlannedProduct(s, h, 2 * d + 2 * 1024 + 64, cut="columns"), PlannedProduct(s, d, h, cut="inner")
    scan = PlannedProduct(s, 128, d, cut="columns", weight=False, fused=True, times=2, grows="batch")
    weights = h * (3 * d + 2 * 1024 + 64)
    cut = 8 * s * d
    return Block("state", products=(inside, scan, out), weights=weights + h, weights_cut=weights, moved=cut + 14 * s * h,
                 moved_cut=cut, kept=s * 4 * d + 2.5 * s * h, kept_cut=s * 4 * d, inputs=s * h, out=s * h, kernels=16,
                 tp_sums=1)  # fmt: skip
