"""What a rank keeps when its training ends in an error: the last good state, its record, and what its memory was used for."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from plait.config.errors import PlaitError
from plait.engine.elastic import Keeper
from plait.engine.engine import Engine
from plait.engine.metrics import Recorder
from plait.engine.out_of_memory import out_of_memory
from plait.engine.run_directory import RunDirectory
from plait.launch.stopping import Stopped, given_up


@contextmanager
def good_state_saved(engine: Engine, recorder: Recorder, keep: int) -> Iterator[None]:
    """Around a step and what follows it. If the step is not finite and the run stops, the state before it, which is good, is saved
    first. All ranks raise then, so all save."""
    try:
        yield
    except PlaitError as error:
        if error.codes[0] not in ("N001", "N002") or not engine.position.step or not engine.whole():
            raise
        recorder.flush()
        first, *rest = error.problems
        fix = (f"the state before it is saved in {engine.save(keep)}", *first.fix)
        raise PlaitError([dataclasses.replace(first, fix=fix), *rest], error.exit_code) from None


def failure_of(
    engine: Engine, run: RunDirectory, recorder: Recorder, keeper: Keeper | None, raised: Exception | Stopped
) -> BaseException:
    """What the rank raises for what ended its training. Flushes the record, and hands the rank's state to the launcher's next start."""
    error = given_up(engine.place.rank, engine.position.step) if isinstance(raised, Stopped) else raised
    with suppress(Exception):  # the device may be what failed
        recorder.flush()
    if keeper is not None:
        keeper.lost(error, recorder.row)
    return out_of_memory(engine, run, error) or error
