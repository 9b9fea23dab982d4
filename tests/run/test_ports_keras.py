"""The port in examples/ports/keras: the job trains to the result of the original script, under the plans that can split it."""

import subprocess
import sys
from pathlib import Path

import pytest
from ported import PORTS, equal, first_epoch_is_the_same
from rarely import sampled


@pytest.mark.slow
def test_it_trains_what_the_script_trains(tmp_path: Path) -> None:
    first_epoch_is_the_same("keras", "fsdp=2", seed=0, samples=96, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2 microbatches=2"])
def test_it_is_equal_to_one_device(plan: str, tmp_path: Path) -> None:
    equal("keras", plan, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "optimizer", "loss", "says"),
    sampled(
        5,
        [
            ("Dropout(0.5)", "'adam'", "'mse'", "draws random numbers or counts"),
            ("BatchNormalization()", "'adam'", "'mse'", "draws random numbers or counts"),
            ("Dense(1)", "'lion'", "'mse'", "the optimizer Lion has no equivalent in torch"),
            ("Dense(1)", "'sgd'", "'hinge'", "the loss hinge has no equivalent in torch"),
            ("Dense(1)", "keras.optimizers.Adam(clipvalue=1.0)", "'mse'", "the optimizer's clipvalue is not supported by a job"),
        ],
    ),
)
def test_what_a_model_may_not_have(layer: str, optimizer: str, loss: str, says: str) -> None:
    """Runs in a separate process, where the backend can be chosen."""
    code = f"""
import before, keras, plait
model = keras.Sequential([keras.Input((2,)), keras.layers.{layer}])
model.compile(optimizer={optimizer}, loss={loss})
try:
    plait.from_keras(model, *before.points(), epochs=1)
except plait.PlaitError as error:
    print(error)
"""
    told = subprocess.run([sys.executable, "-c", code], cwd=PORTS / "keras", capture_output=True, text=True, check=True)
    assert "error[J039]" in told.stdout and says in told.stdout, told
