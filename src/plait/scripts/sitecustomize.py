"""Load the recorder into every Python process of a command when it imports torch. This file is in a folder on PYTHONPATH."""

import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace

SETTINGS = "settings.json"
"""Name of the file with the recorder's settings, next to the link to this file."""
PACKAGE = "plait_recorder"
"""Package name of the recorder's files in scripts, so that plait itself is not imported."""
HERE = os.path.dirname(os.path.abspath(__file__))


def find_torch(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of torch, which loads the recorder after torch; None for other modules."""
    if name != "torch":
        return None
    sys.meta_path.remove(FINDER)
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    if spec is not None and spec.loader is not None:
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (execute(module), load_recorder())[0]
    return spec


FINDER = SimpleNamespace(find_spec=find_torch)


def load_recorder() -> None:
    """Load the recorder, and install its hooks in torch."""
    package = sys.modules[PACKAGE] = ModuleType(PACKAGE)
    package.__path__ = [os.path.dirname(os.path.realpath(__file__))]
    with open(os.path.join(HERE, SETTINGS), encoding="utf-8") as file:
        importlib.import_module(f"{PACKAGE}.recorder").install(json.load(file))


if __name__ == "sitecustomize" and os.path.exists(os.path.join(HERE, SETTINGS)):
    sys.meta_path.insert(0, FINDER)
    own = importlib.machinery.PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path or ".") != HERE])
    if own is not None and own.loader is not None:  # the one that this file shadows
        own.loader.exec_module(importlib.util.module_from_spec(own))
