"""Loads the recorder into every Python process of a command, once the process itself imports torch: it stands in a folder on PYTHONPATH."""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

SETTINGS = "settings.json"
"""The recorder's settings lie in this file next to the link to this one."""


PACKAGE = "plait_recorder"
"""The name under which scripts have the recorder's files, so that plait itself is not imported."""


class AfterTorch(importlib.abc.MetaPathFinder):
    """Loads the recorder after torch was imported."""

    def __init__(self, settings: str):
        self.settings = settings

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of torch."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_hook(module: ModuleType) -> None:
                execute(module)
                with open(self.settings, encoding="utf-8") as file:
                    settings = json.load(file)
                package = sys.modules[PACKAGE] = ModuleType(PACKAGE)
                package.__path__ = [os.path.dirname(os.path.realpath(__file__))]
                importlib.import_module(f"{PACKAGE}.recorder").install(settings)

            spec.loader.exec_module = execute_and_hook
        return spec


here = os.path.dirname(os.path.abspath(__file__))
if __name__ == "sitecustomize" and os.path.exists(os.path.join(here, SETTINGS)):
    sys.meta_path.insert(0, AfterTorch(os.path.join(here, SETTINGS)))
    own = importlib.machinery.PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path or ".") != here])
    if own is not None and own.loader is not None:  # the one that this file stands in front of
        own.loader.exec_module(importlib.util.module_from_spec(own))
