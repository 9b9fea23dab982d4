"""A job with its own order and token budget, which the command line can change."""

import dataclasses

import torch
from jobs_padded import Sentences, tagger

import plait

ORDERS = {
    "permutation": None,
    "sequential": plait.orders.sequential,
    "weighted": plait.orders.weighted([1.0 + i % 5 for i in range(48)], samples=30),
    "mixed": plait.orders.mixed((40, 8), (0.5, 0.5), samples=64),
    "curriculum": plait.orders.curriculum(range(48), epochs=3, start=0.5),
    "own": lambda seed, epoch, length: torch.randperm(length)[: length // 2].repeat(2),
}


def lengths() -> list[int]:
    return [len(row) for row in Sentences().rows]


ORDERS["grouped"] = plait.orders.length_grouped(lengths(), 4, mega=3)


def job(order: str = "grouped", tokens: int = 60, padded: bool = True, steps: int = 14) -> plait.Job:
    """`tokens`: 0 disables the budget."""
    budget = plait.TokenBudget(tokens, lengths, padded) if tokens else None
    return dataclasses.replace(tagger(), order=ORDERS[order], token_budget=budget, steps=steps)
