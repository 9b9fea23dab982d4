"""The machines of published runs: a data sheet of `machines/`, with the network that the row states."""

import re
from dataclasses import replace
from functools import cache
from math import ceil

from plait.config.hardware import Level, Link
from plait.config.machine import Machine

ALIASES = (
    ("GB200", "gb200"), ("GB300", "gb300"), ("B300", "b300"), ("B200", "b200"), ("GH200", "gh200"), ("H200", "h200"), ("H20", "h20"),
    ("H100-96GB", "h100-96gb"), ("H100 NVL", "h100-nvl"), ("H100 PCIe", "h100-pcie"), ("H100", "h100"), ("H800", "h800"), ("A800", "a800"),
    ("A100.*[^0-9]40", "a100-40gb"), ("A100.*PCIe", "a100-pcie"), ("A100", "a100"), ("A10G", "a10g"), ("A10", "a10"), ("A30", "a30"),
    ("A40", "a40"), ("TPU ?v4", "tpu-v4"), ("TPU ?v5(e| lite)", "tpu-v5e"),
    ("TPU ?v5p", "tpu-v5p"), ("TPU ?v6e|Trillium", "tpu-v6e"), ("TPU ?v3", "tpu-v3"),
    ("V100-SXM3", "v100-dgx2"), ("V100.*[^0-9]16", "v100-16gb"), ("V100", "v100"), ("P100", "p100"), ("P40", "p40"), ("K80", "k80"),
    ("TITAN RTX", "titan-rtx"), ("MI300X", "mi300x"), ("MI325X", "mi325x"), ("MI355X", "mi355x"), ("MI350X", "mi350x"), ("MI250X?", "mi250x"),
    ("MI210", "mi210"), ("Gaudi 2", "gaudi2"), ("Gaudi 3", "gaudi3"), ("(RTX )?PRO 6000", "rtx-pro-6000"),
    ("RTX 6000.*(Ada|48)|6000 Ada", "rtx-6000-ada"), ("RTX 8000", "quadro-rtx-8000"), ("RTX 6000", "quadro-rtx-6000"), ("(RTX )?A6000", "rtx-a6000"),
    ("(RTX )?A5000", "rtx-a5000"), ("(RTX )?A4000", "rtx-a4000"), ("(RTX )?5070 ?Ti", "rtx-5070-ti"), ("(RTX )?5090", "rtx-5090"),
    ("(RTX )?5080", "rtx-5080"), ("(RTX )?4090", "rtx-4090"), ("(RTX )?4080", "rtx-4080"), ("(RTX )?3090", "rtx-3090"),
    ("(RTX )?3080 ?Ti", "rtx-3080-ti"),
    ("(RTX )?3080", "rtx-3080"), ("(RTX )?4070 ?Ti", "rtx-4070-ti"), ("(RTX )?4070", "rtx-4070"), ("(RTX )?4060 ?Ti", "rtx-4060-ti"),
    ("(RTX )?3070", "rtx-3070"), ("(RTX )?3060", "rtx-3060"), ("TITAN V", "titan-v"), ("MI100", "mi100"), ("(RTX )?2080 ?Ti", "rtx-2080-ti"),
    ("(RTX )?2080", "rtx-2080"), ("(GTX )?1080 ?Ti", "gtx-1080-ti"), ("L40S", "l40s"), ("L40", "l40"), ("T4", "t4"), ("L4", "l4"),
)  # fmt: skip
"""A part of a row's device name, and its data sheet; the first match counts."""

UNSTATED = 100e9 / 8
"""Bytes/s of network per device, if neither row nor data sheet states it: one card of 100 Gb/s each."""


class OneCard(Machine):
    """A machine whose software sends through one network card of a node, probably as in DeepSpeed's ZeRO-3 of 2021."""

    def find_levels(self, ranks: int, stride: int = 1) -> tuple[Level, ...]:
        found = super().find_levels(ranks, stride)
        return tuple(level._replace(inside=1) if level.is_between_nodes else level for level in found)


@cache
def site(gpu: str, per_node: int, nodes: int, interconnect: str, one_card: bool) -> Machine | None:
    """Return the machine of a row, or None if its data sheet is unknown."""
    sheet = next((name for words, name in ALIASES if re.search(rf"(?i)(?<![a-z0-9])({words.replace(' ', '[ _-]?')})(?![0-9])", gpu)), None)
    if sheet is None or sheet not in known():
        return None
    if sheet == "v100" and per_node == 4 and "NVLink" in interconnect:
        sheet = "v100-quad"
    machine = Machine.from_name(sheet)
    speed = network(interconnect, per_node)
    stated = next((link.bandwidth for link in machine.links if link.is_between_nodes), None)
    inner = tuple(inside(link, interconnect) for link in machine.links if not link.is_between_nodes)
    between = Link("network", None, speed or stated or UNSTATED, 14e-6, "network")
    kind = OneCard if one_card and "measured" not in interconnect else Machine
    named = {f: getattr(machine, f) for f in Machine.__dataclass_fields__}
    named |= {"links": (*inner, between), "devices_per_node": per_node, "nodes": nodes}
    return kind(**named)


@cache
def known() -> frozenset[str]:
    """The names of all data sheets."""
    from plait.config.machine_file import read_catalog

    return frozenset(read_catalog())


def inside(link: Link, interconnect: str) -> Link:
    """Return the link inside a node, as stated by the row."""
    if "P2P_DISABLE" in interconnect or ("PCIe" in interconnect and link.kind == "nvlink"):
        return replace(link, bandwidth=12e9, kind="pcie", latency=5.7e-6)
    return link


def network(text: str, per_node: int) -> float | None:
    """Return the bytes/s per device between nodes from a row's text: `8x200Gb/s`, `1600 Gb/s per node`, `400 Gb/s … per GPU`."""
    if found := re.search(r"(\d+) ?x ?(\d+) ?Gb/s", text):
        return float(found[1]) * float(found[2]) * 1e9 / 8 / per_node
    if found := re.search(r"(\d+) ?Gb/s[^;]*per GPU", text):
        return float(found[1]) * 1e9 / 8
    if found := re.search(r"(\d+)-(\d+) ?Gb/s", text):
        return (float(found[1]) + float(found[2])) / 2 * 1e9 / 8 / per_node
    if found := re.search(r"(\d+) ?Gb/s", text):
        return float(found[1]) * 1e9 / 8 / per_node
    if "OPA" in text:
        return 4 * 100e9 / 8 / per_node
    return None


def machine_of(row: dict[str, str]) -> Machine | None:
    """Return the machine of a row."""
    third = str(row.get("fsdp_or_zero_stage") or "").startswith("3")
    one_card = third and row.get("precision") == "fp16" and "DeepSpeed" in row.get("note", "")
    gpus = int(float(row["gpus"]))
    per_node = int(float(row.get("gpus_per_node") or 8))
    return site(row["gpu"], per_node, max(1, ceil(gpus / per_node)), row.get("interconnect") or "", one_card)
