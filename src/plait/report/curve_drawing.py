"""A run's loss as one small SVG for a notebook, light or dark as the reader likes: it has the colours of the text around it."""

from html import escape
from math import isfinite

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 200, 56, 12, 24, 24
"""Pixels of the picture, and around the curve."""
POINTS = 400
"""More are drawn as means of neighbours."""


def drawn(title: str, points: list[tuple[int, float]]) -> str:
    """The curve of (step, value), the lowest and highest value and the first and last step beside it."""
    points = thinned([(step, value) for step, value in points if isfinite(value)])
    if not points:
        return ""
    steps, values = zip(*points)
    low, high = min(values), max(values)
    wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    x = lambda step: LEFT + wide * (step - steps[0]) / max(1, steps[-1] - steps[0])  # noqa: E731
    y = lambda value: TOP + tall * ((high - value) / (high - low) if high > low else 0.5)  # noqa: E731
    line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)
    labels = [
        (LEFT, TOP - 10, "start", title), (LEFT - 6, TOP + 8, "end", f"{high:.4g}"),
        (LEFT - 6, TOP + tall, "end", f"{low:.4g}" if high > low else ""),
        (LEFT, HEIGHT - 8, "start", f"step {steps[0]}"), (WIDTH - RIGHT, HEIGHT - 8, "end", f"step {steps[-1]}"),
    ]  # fmt: skip
    texts = "".join(f'<text x="{a}" y="{b}" text-anchor="{at}">{escape(word)}</text>' for a, b, at, word in labels)
    frame = f"M{LEFT} {TOP}V{TOP + tall}H{WIDTH - RIGHT}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        f'style="max-width:100%" font-family="system-ui,sans-serif" font-size="12" fill="currentColor">'
        f"<title>{escape(title)}: {values[0]:.4g} to {values[-1]:.4g}</title>{texts}"
        f'<path d="{frame}" fill="none" stroke="currentColor" stroke-opacity=".4"/>'
        f'<polyline points="{line}" fill="none" stroke="#3b82c4" stroke-width="1.5"/></svg>'
    )


def thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most `POINTS` of them: the last step of each part, and the mean of its values.

    >>> thinned([(1, 2.0), (2, 1.0)])
    [(1, 2.0), (2, 1.0)]
    """
    count = min(POINTS, len(points))
    parts = [points[len(points) * i // count : len(points) * (i + 1) // count] for i in range(count)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]
