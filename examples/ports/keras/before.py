"""A typical classifier of points in Keras on torch:  python examples/ports/keras/before.py"""

import os
from collections.abc import Sequence

os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np

SAMPLES, BATCH, EPOCHS = 96, 8, 3


def points() -> tuple[np.ndarray, np.ndarray]:
    """Points of the plane, and which of three rings around the origin they are in."""
    x = np.random.default_rng(1).normal(size=(SAMPLES, 2)).astype("float32")
    return x, np.digitize(np.linalg.norm(x, axis=1), [0.8, 1.5])


def model() -> keras.Model:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(32, activation="tanh"), keras.layers.Dense(3, activation="softmax")]
    made = keras.Sequential([keras.Input((2,)), *layers])
    made.compile(optimizer=keras.optimizers.Adam(1e-2), loss="sparse_categorical_crossentropy")
    return made


def main(order: Sequence[int] | None = None) -> list[float]:
    """Return the loss of each step. `order`: sample indices, instead of a random order."""
    x, y = points()
    made, losses = model(), []
    places = np.arange(SAMPLES) if order is None else np.array(order)
    for _ in range(EPOCHS):
        for first in range(0, SAMPLES, BATCH):
            chosen = places[first : first + BATCH]
            losses.append(float(made.train_on_batch(x[chosen], y[chosen])))
            made.reset_metrics()
    return losses


if __name__ == "__main__":
    print(main())
