"""Puts modelling code into a hybrid's folder, so that it loads with trust_remote_code=True where hybridize is not.

The code is made from this package's own modules, in pure torch; where hybridize is installed, transformers takes the
package instead, and with it the kernels.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import hybridize
from hybridize.checksums import SUMS, write_checksums
from hybridize.hub.bundle import bundle
from hybridize.hybrid.config import PREFIX
from hybridize.hybrid.families import FAMILIES
from hybridize.workspace import write_json, write_text

MODULE = "modeling_hybridize"
CODE = f"{MODULE}.py"
_ROOTS = [("hybridize.hybrid.config", "hybrid_config_class"), ("hybridize.hybrid.model", "hybrid_class")]
_HEADER = '''"""A hybrid of attention and state-space layers, as a model of transformers; needs no more than torch.

Made by hybridize {version} from its own modules, licensed under Apache-2.0: change it there, not here. With hybridize
installed (pip install hybridize) none of this is used, and GPUs run its kernels.
"""

from __future__ import annotations

'''


@cache
def modelling_code(model_type: str) -> str:
    """The source of a module with the config and the model class of this hybrid model type, and all they need."""
    source = FAMILIES[model_type.removeprefix(PREFIX)]
    code, _ = bundle(_ROOTS)
    classes = f'''

_MODEL = getattr(import_module("transformers"), "{source}")
{_config_name(model_type)} = hybrid_config_class(_MODEL.config_class)
Hybrid{source} = hybrid_class(_MODEL)
'''
    return _HEADER.format(version=hybridize.__version__) + code + classes


def _config_name(model_type: str) -> str:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return f"Hybrid{CONFIG_MAPPING_NAMES[model_type.removeprefix(PREFIX)]}"


def with_auto_map(raw: dict[str, Any]) -> dict[str, Any]:
    """A hybrid's config.json that says where in that module its classes are."""
    model_type = raw["model_type"]
    model = f"Hybrid{FAMILIES[model_type.removeprefix(PREFIX)]}"
    classes = {"AutoConfig": f"{MODULE}.{_config_name(model_type)}", "AutoModelForCausalLM": f"{MODULE}.{model}"}
    return {**raw, "auto_map": classes}


def write_remote_code(folder: Path, raw: dict[str, Any]) -> None:
    """Write the code into a hybrid's folder whose config.json is `raw`, name it there, and note both files' sums."""
    code, named = modelling_code(raw["model_type"]), with_auto_map(raw)
    path = folder / CODE
    if raw == named and path.is_file() and path.read_text("utf-8", errors="replace") == code:
        return
    listed = (folder / SUMS).exists()
    write_text(path, code)  # first: a config must not name what is not there
    write_json(folder / "config.json", named)
    if listed:
        write_checksums(folder, [CODE, "config.json"])
