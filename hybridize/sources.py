"""Opens a source model: a folder, a repository on the Hub, or a GGUF file, checked before anything large is read.

Refused, each with one sentence: what is missing or damaged, quantised (GGUF apart), not a causal decoder, already a
hybrid, or in need of code of its own.
"""

import importlib.util
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridize.devices import pick_device, pick_dtype
from hybridize.errors import HybridizeError, SourceError, explain
from hybridize.weights import check_weights

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

REPOSITORY_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_DAMAGED = " (if the file is damaged or cut short, download or copy it again)"  # a GGUF is not checked before
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".index.json", ".gguf", ".pt", ".pth", ".h5", ".msgpack")
_OWN = ("config.json", "README.md", "prime.json", "SHA256SUMS")  # what a hybrid has of its own
_TEXT_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "LICENSE*", "NOTICE*", "README.md"]


class Source:
    """A source model that passed every check that can be made without reading its weights."""

    def __init__(
        self,
        name: str,
        folder: Path,
        config: "PretrainedConfig",
        *,
        gguf: str | None = None,
        repository: str | None = None,
        revision: str | None = None,
    ) -> None:
        self.name = name
        self.path = folder
        self.config = config
        self.gguf = gguf
        self.repository = repository
        self.revision = revision

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The source's tokenizer, loaded on first use."""
        from transformers import AutoTokenizer

        extra = {"gguf_file": self.gguf} if self.gguf else {}
        with _explained(self.name, "its tokenizer cannot be loaded"):
            tokenizer = AutoTokenizer.from_pretrained(self.path, **extra)
            # Where its files are missing, some families get one without a vocabulary, which reads all text as nothing.
            if not tokenizer("a", add_special_tokens=False)["input_ids"]:
                raise SourceError(f"{self.name} has no tokenizer: copy its files too, such as tokenizer.json.")
            return tokenizer

    @property
    def stored_dtype(self) -> "torch.dtype":
        """The number format that its config names; else bfloat16, as for a GGUF file, which holds no more than that."""
        import torch

        own = getattr(self.config, "dtype", None)
        own = getattr(torch, own, None) if isinstance(own, str) else own
        return own if isinstance(own, torch.dtype) and not self.gguf else torch.bfloat16

    def load(
        self,
        dtype: "str | torch.dtype | None" = None,
        device: "str | torch.device | None" = None,
        room: dict[int, int] | None = None,
    ) -> "PreTrainedModel":
        """The model with its weights, in eval mode; SourceError when a tensor is missing or left over.

        Without a dtype: float32 on a CPU, bfloat16 on an accelerator. Without a device: the fastest there is. With
        `room`, bytes by GPU, the layers are spread over these GPUs, and those that do not fit stay in main memory.
        """
        target = pick_device(None if device is None else str(device))
        number = pick_dtype(dtype, target)
        if room is not None and importlib.util.find_spec("accelerate") is None:
            raise SourceError(f"{self.name} does not fit on one GPU; to spread it, pip install accelerate.")
        self.fetch()
        if room is None:
            return self._from_pretrained(number).to(target).eval()  # type: ignore[arg-type]
        everything: dict[Any, int] = {**room, "cpu": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
        return self._from_pretrained(number, device_map="auto", max_memory=everything).eval()

    @property
    def has_weights(self) -> bool:
        """Whether weights are there, or can be had from the Hub."""
        return bool(self.gguf or self.repository or any(self.path.glob("*.safetensors")))

    def fetch(self) -> None:
        """Download the weights if they are on the Hub, and check that they are whole."""
        if self.repository:
            self.path = _download(self.repository, self.revision, [*_TEXT_FILES, "*.safetensors"])
        if not self.gguf:
            check_weights(self.path)

    def _from_pretrained(self, dtype: "torch.dtype", **extra: Any) -> "PreTrainedModel":
        from transformers import AutoModelForCausalLM

        if self.gguf:
            from transformers.utils.quantization_config import GgufConfig

            # Otherwise newer versions keep the blocks packed where they find a kernel for them.
            extra |= {"gguf_file": self.gguf, "quantization_config": GgufConfig(dequantize=True)}
        with _explained(self.name, f"its weights cannot be loaded{_DAMAGED if self.gguf else ''}"):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self.path, config=self.config, dtype=dtype, output_loading_info=True, **extra
            )
            model, report = loaded
        for what in ("missing", "unexpected", "mismatched"):
            names = sorted(str(name) for name in report[f"{what}_keys"])
            if names:
                raise SourceError(
                    f"{self.name} has {len(names)} {what} tensors (first: {names[0]}): its weights do not belong to "
                    "its config.json; download or copy both again."
                )
        if self.gguf:
            _forget_quantisation(model)
        model.config._name_or_path = self.name
        return model


def open_source(name: str | os.PathLike[str], revision: str | None = None, *, weights: bool = True) -> Source:
    """Open a model folder, a GGUF file or folder, or a repository on the Hub, and check it.

    Raises SourceError when it cannot be the source of a hybrid. Weights on the Hub are downloaded by `Source.load`;
    weights=False: for what reads none, a folder may lack them.
    """
    name = os.fspath(name)
    path = Path(name).expanduser()
    if revision and path.exists():
        raise SourceError(f"{name} is a local path, which has no revisions; leave out --revision {revision}.")
    if path.is_file():
        return _open_gguf(name, path)
    if path.is_dir():
        return _open_folder(name, path, weights)
    if not REPOSITORY_NAME.fullmatch(name):
        raise SourceError(f"There is no folder or file {name}; check the path, or give a repository as OWNER/NAME.")
    return _open_repository(name, revision)


def fetch_model(repository: str) -> Path:
    """The folder of a repository on the Hub with its config, tokenizer and weights, downloaded if need be."""
    return _download(repository, None, [*_TEXT_FILES, "*.safetensors"])


def companions(folder: Path) -> list[Path]:
    """What a hybrid takes over from its source's folder: tokenizer, chat template, generation config, licence."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    return [path for path in paths if path.name not in _OWN and not path.name.endswith(WEIGHT_SUFFIXES)]


def _open_folder(name: str, folder: Path, weights: bool) -> Source:
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if ggufs and not any(folder.glob("*.safetensors")):
        if len(ggufs) > 1:
            raise SourceError(
                f"{name} holds {len(ggufs)} GGUF files; give the path of one, such as {folder / ggufs[0]}."
            )
        return _open_gguf(name, folder / ggufs[0])
    raw = _read_config(name, folder)
    _refuse(name, raw)
    source = Source(name, folder, _parse_config(name, folder))
    if weights or source.has_weights:
        check_weights(folder)
    return source


def _open_repository(name: str, revision: str | None) -> Source:
    folder = _download(name, revision, _TEXT_FILES)
    raw = _read_config(name, folder)
    _refuse(name, raw)
    # The snapshot's folder is named by its commit, so that the weights are taken from the same one.
    return Source(name, folder, _parse_config(name, folder), repository=name, revision=folder.name)


def _open_gguf(name: str, path: Path) -> Source:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise SourceError(f"{name} is a file, but not a GGUF file; give a model folder or a GGUF file.")
    if re.search(r"-\d{5}-of-\d{5}\.gguf$", path.name):
        raise SourceError(f"{path} is one part of a split GGUF; merge the parts first, with llama-gguf-split --merge.")
    require_gguf(name)
    config = _parse_config(name, path.parent, path.name)
    _refuse(name, config.to_dict())
    return Source(name, path.parent, config, gguf=path.name)


def require_gguf(name: str) -> None:
    """Raise SourceError when a package that reading a GGUF file needs is not installed."""
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise SourceError(f"{name} is a GGUF file, which needs {' and '.join(missing)}: pip install 'hybridize[gguf]'")


def _download(repository: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    with _explained(repository, "it cannot be had from the Hub"):
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))


def _read_config(name: str, folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise SourceError(f"{name} has no config.json; give a folder saved by transformers, or a GGUF file.") from None
    except ValueError as error:
        raise SourceError(f"{path} is not valid JSON ({error}); download or copy it again.") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise SourceError(f"{path} has no model_type; give a folder saved by transformers.")
    return raw


def _refuse(name: str, raw: dict[str, Any]) -> None:
    """Raise SourceError for a config that cannot be a source's."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    model_type = raw["model_type"]
    if model_type.startswith(("hybridize_", "hybrid_")) or "hybrid" in raw:
        raise SourceError(f"{name} is a hybrid already; give the plain model that it was made from.")
    quantised = raw.get("quantization_config") or (raw.get("text_config") or {}).get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else "unknown"
        raise SourceError(f"{name} is quantised ({method}); give the unquantised model, or a GGUF file of it.")
    if model_type not in CONFIG_MAPPING_NAMES:
        import transformers

        reason = "it needs code of its own" if raw.get("auto_map") else "a newer transformers may know it"
        raise SourceError(f"{name}: transformers {transformers.__version__} has no {model_type!r} models; {reason}.")
    architectures = raw.get("architectures") or []
    causal = not architectures or any(kind.endswith(("ForCausalLM", "LMHeadModel")) for kind in architectures)
    if raw.get("is_encoder_decoder") or not causal or model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        kind = architectures[0] if architectures else model_type
        raise SourceError(f"{name} is a {kind}, not a causal decoder; give a model whose class ends in ForCausalLM.")


def _parse_config(name: str, folder: Path, gguf: str | None = None) -> "PretrainedConfig":
    from transformers import AutoConfig

    with _explained(name, f"its configuration cannot be read{_DAMAGED if gguf else ''}"):
        return AutoConfig.from_pretrained(folder, **({"gguf_file": gguf} if gguf else {}))


def _forget_quantisation(model: "PreTrainedModel") -> None:
    """Let a dequantised model be saved: transformers still takes it for a quantised one."""
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        model.__dict__.pop(name, None)
    for name in ("quantization_config", "_model_name_or_path"):
        model.config.__dict__.pop(name, None)


@contextmanager
def _explained(name: str, what: str) -> Iterator[None]:
    """Turn what other libraries raise into a SourceError that says which model and what failed."""
    try:
        yield
    except (HybridizeError, MemoryError):
        raise
    except Exception as error:  # a damaged file makes the readers raise anything
        reason = explain(error) or (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SourceError(f"{name}: {what}: {reason}") from error
