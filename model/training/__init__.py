"""Training by Lightning, which imports torchmetrics for two classes, and that imports a hundred metrics,
transformers and matplotlib with them: 1.5 of the 4.8 s that a short run takes on a CPU. Here it gives the two
at once, and the rest when somebody asks for it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from lightning_utilities.core.imports import RequirementCache


class _TheRestLater(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        def rest(name: str) -> Any:
            if name.startswith("__"):  # what tools ask every module for
                raise AttributeError(name)
            del module.__getattr__
            self.loader.exec_module(module)
            return getattr(module, name)

        module.__version__ = metadata.version("torchmetrics")
        module._logger = logging.getLogger("torchmetrics")
        try:
            with _without_matplotlib():
                import_module("torchmetrics.utilities")  # before metric, which it imports
                module.Metric = import_module("torchmetrics.metric").Metric
                module.MetricCollection = import_module("torchmetrics.collections").MetricCollection
        except ImportError:  # of a version that is built otherwise, all
            for name in [name for name in sys.modules if name.startswith("torchmetrics.")]:
                del sys.modules[name]
            self.loader.exec_module(module)
        else:
            module.__getattr__ = rest


class _Later(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


@contextmanager
def _without_matplotlib() -> Iterator[None]:
    """What torchmetrics draws by is loaded when it draws."""
    available = RequirementCache.__bool__
    RequirementCache.__bool__ = lambda self: self.requirement != "matplotlib" and available(self)
    try:
        yield
        plot = import_module("torchmetrics.utilities.plot")
        plot.matplotlib, plot.plt = _Later("matplotlib"), _Later("matplotlib.pyplot")
    finally:
        RequirementCache.__bool__ = available


class _Torchmetrics(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name) if name == "torchmetrics" else None
        if spec is not None and spec.loader is not None:
            spec.loader = _TheRestLater(spec.loader)
        return spec


sys.meta_path.insert(0, _Torchmetrics())
