"""The live line of a run in a notebook: one output of the cell that is written over, and taken away at the end.

Notebooks show what is displayed under a name again when the name is used again; no widgets are needed. In IPython on a terminal, and
in Python without it, nothing is displayed.
"""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.display import DisplayHandle


class InlineLine:
    """One line below a cell; nothing is there before its first text."""

    def __init__(self):
        self.handle: DisplayHandle | None = None

    @staticmethod
    def here() -> "InlineLine | None":
        """A line in the cell that is running now; None where there is no notebook."""
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython is not None else None
        return InlineLine() if hasattr(shell, "kernel") else None

    def update(self, text: str) -> None:
        """Show this instead of what is there."""
        from IPython.display import DisplayHandle

        if self.handle is None:
            self.handle = DisplayHandle()
            self.handle.display({"text/plain": text}, raw=True)
        else:
            self.handle.update({"text/plain": text}, raw=True)

    def close(self) -> None:
        """Take it away."""
        if self.handle is not None:
            self.update("")
