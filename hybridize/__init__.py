"""Turn a pre-trained Transformer into a hybrid of attention and state-space layers.

Importing this package imports neither torch nor transformers: public names are loaded on first use, and the Auto
classes of transformers learn the hybrid model types as soon as both packages are loaded, in either order.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# In a checkout (an editable install, or the repository root as working directory) the kernels lie beside this folder;
# in a wheel they lie inside it.
_root = Path(__file__).resolve().parent.parent
if not (_root / "hybridize" / "kernels").is_dir() and (_root / "kernels").is_dir():
    __path__.append(str(_root))

_PUBLIC = {
    "LayerPlan": "hybridize.hybrid.plan",
    "convert": "hybridize.hybrid.model",
    "load": "hybridize.hybrid.loading",
    "prime": "hybridize.priming.run",
    "probe": "hybridize.probing.run",
    "push": "hybridize.hub.run",
}

__all__ = ["LayerPlan", "__version__", "convert", "load", "prime", "probe", "push"]

if TYPE_CHECKING:
    from hybridize.hub.run import push
    from hybridize.hybrid.loading import load
    from hybridize.hybrid.model import convert
    from hybridize.hybrid.plan import LayerPlan
    from hybridize.priming.run import prime
    from hybridize.probing.run import probe


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562) and keep it."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'hybridize' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


from hybridize import _hook  # noqa: E402  (registration may import this package's submodules, so it comes last)

_hook.install()
