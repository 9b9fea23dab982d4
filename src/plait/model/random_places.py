"""Random places: what pairs of runs of a model, on batches of two sizes, say of the tensors that it draws."""

from plait.model.trace import RunTrace


def places_of(
    rounds: list[list[RunTrace]], sizes: tuple[int, int]
) -> tuple[dict[str, int | None], dict[str, tuple[int, ...]], list[str]]:
    """Batch dim and shape of every place, and the owners of draws that do not grow in step with the batch, in one dim."""
    places: dict[str, int | None] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    coupled = []
    a, b = sizes
    for small, large in rounds:
        for place, shape in small.drawn.items():
            other = large.drawn.get(place)
            grown = [d for d, (m, n) in enumerate(zip(shape, other or ())) if m != n]
            if (
                other is None
                or len(shape) != len(other)
                or len(grown) > 1
                or any(shape[d] * b != other[d] * a for d in grown)
            ):
                coupled.append(place.split("#")[0] or "the model")
            elif place not in places:
                shapes[place] = tuple(n // a if d in grown else n for d, n in enumerate(shape))
            if places.get(place) is None:
                places[place] = grown[0] if grown else None
    return places, shapes, coupled
