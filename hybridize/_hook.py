"""Registers hybrid model types with transformers as soon as its Auto classes are loaded, without loading them.

Importing transformers' Auto classes imports torch, so `import hybridize` cannot do it. If they are loaded already,
registration runs at once; otherwise a finder on `sys.meta_path` waits for exactly one module, registers after it ran,
and removes itself.
"""

import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

AUTO_MODULE = "transformers.models.auto.configuration_auto"


def register() -> None:
    """Register the hybrid model types; a failure warns and never breaks the import of transformers."""
    try:
        from hybridize.hybrid.registry import register as register_types

        register_types()
    except Exception as error:
        warnings.warn(
            f"hybridize could not register its models with transformers ({type(error).__name__}: {error}); "
            "hybrid folders will not load through the Auto classes.",
            RuntimeWarning,
            stacklevel=2,
        )


def install() -> None:
    """Register now if transformers' Auto classes are loaded, or as soon as they are."""
    if AUTO_MODULE in sys.modules:
        import_module(AUTO_MODULE)  # returns at once, or waits for a thread that is still importing it
        register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds one module the way the other finders do, with a loader that registers afterwards."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != AUTO_MODULE:
            return None
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _RegisteringLoader(spec.loader, self)
                return spec
        return None


class _RegisteringLoader(Loader):
    """Runs the module with its own loader, gives that loader back, and registers."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self.loader = loader
        self.finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        with suppress(ValueError):  # another thread, or a second copy of this package, removed it first
            sys.meta_path.remove(self.finder)
        register()
