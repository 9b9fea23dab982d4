"""The job of a companion process in the tests of companions."""

from collections.abc import Callable

from plait.launch.child import EndOfWork


def main(end: EndOfWork, say: Callable[[str], None], *words: str) -> None:
    print(" ".join(words), flush=True)
    say(f"said\n{' '.join(words)}")
    while not end.wait(0.1):
        pass
    print(end.word, flush=True)
    say("the end")
