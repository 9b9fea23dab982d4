"""What the tests of companions have one do."""

from collections.abc import Callable

from plait.launch.companion import Until


def main(until: Until, say: Callable[[str], None], *words: str) -> None:
    print(" ".join(words), flush=True)
    say(f"said\n{' '.join(words)}")
    while not until.wait(0.1):
        pass
    print(until.word, flush=True)
    say("the end")
