"""A causal LM from a table name, a hub id, a folder or a .gguf file: find it, describe it, load it.

Every kind ends as a local transformers folder, so there is one way of loading: strict (a missing or an
unexpected weight is an error) and off the network. Importing this module imports neither torch nor
transformers; `describe` and `load` do.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kveval import checkpoint_scales
from kveval.errors import ConfigError, ModelError, UnknownNameError, UnsupportedError
from kveval.formats.scales import StaticScales
from kveval.geometry import LayerGeometry, geometry_from_config, text_config
from kveval.identity import digest
from kveval.model_cache import cached_sha256, gguf_folder, models_dir, read_manifest, weight_files
from kveval.model_fetch import PackagedModel, convert, known_models
from kveval.model_hub import hub_folder, hub_is_present, hub_weights_bytes
from kveval.model_info import ModelInfo, ModelSource, ModelSpec, ResolvedModel

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "LoadedModel",
    "ModelInfo",
    "ModelSource",
    "ModelSpec",
    "PackagedModel",
    "ResolvedModel",
    "carried_scales",
    "compute_device",
    "describe",
    "known_models",
    "load",
    "load_tokenizer",
    "logits_in_float32",
    "resolve",
]

_log = logging.getLogger(__name__)

_DEVICES = "Use auto, cpu, cuda or cuda:N."
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model in eval mode on `device` whose logits are computed in float32, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    info: ModelInfo
    device: torch.device


def resolve(model: ModelSpec) -> ResolvedModel:
    """Find out what `model.id` names: a table name first, then a path, then a hub id.

    A table name that was not fetched yet resolves, with `is_present` False; to read it is an error.

    Raises:
        UnknownNameError: a bare word that the table lacks and that is no path.
        ModelError: a path without a model.
        ConfigError: `revision` with a model that is not on the hub.
    """
    name = model.id
    resolved = _resolve_packaged(name) or _resolve_path(name)
    if resolved is not None:
        if model.revision is not None:
            raise ConfigError(
                f"model {name!r} is a local model, which has no revision {model.revision!r}.",
                remedy="Leave `revision` out, or name the model by its hub id.",
            )
        return resolved
    if "/" not in name:
        raise UnknownNameError("model", name, known_models())
    if not _HUB_ID.fullmatch(name):
        raise ModelError(
            f"model {name!r} is neither an existing path nor a hub id (`owner/name`).",
            remedy=f"Check the path, or name one of: {', '.join(known_models())}.",
        )
    present = hub_is_present(name, model.revision)
    return ResolvedModel(kind="hub", location=name, revision=model.revision, is_present=present)


def describe(model: ModelSpec, device: str = "auto") -> ModelInfo:
    """Everything but the weights: reads the config and the tokenizer, and hashes the weight files.

    Raises:
        KvevalError: the model can't be found or read, or its layers are of an unknown kind.
    """
    resolved = resolve(model)
    folder = _local_folder(resolved, weights=False)
    return _describe(model, resolved, folder, _tokenizer(folder), _device(device))


def carried_scales(model: ModelSpec, layers: Sequence[LayerGeometry]) -> StaticScales | None:
    """Scales of keys and values in the model's checkpoint, or None; see `kveval.checkpoint_scales.find`.

    A hub model's weights are downloaded only if there are any.

    Raises:
        ModelError: the checkpoint can't be read, or its scales are not whole.
    """
    resolved = resolve(model)
    if resolved.kind == "hub":
        folder = _local_folder(resolved, weights=False)
        if not checkpoint_scales.has_scales(checkpoint_scales.hub_tensor_names(resolved.location, folder)):
            return None
    return checkpoint_scales.find(_local_folder(resolved, weights=True), layers)


def compute_device(name: str) -> str:
    """Type of the device that "auto", "cpu" or "cuda" stands for on this machine: "cpu" or "cuda".

    Raises:
        ConfigError: the name is none of these, or the device is not here.
    """
    return _device(name).type


def load_tokenizer(model: ModelSpec) -> PreTrainedTokenizerBase:
    """The model's tokenizer, without its weights."""
    return _tokenizer(_local_folder(resolve(model), weights=False))


def load(model: ModelSpec, *, device: str = "auto") -> LoadedModel:
    """Load weights and tokenizer, strictly, in eval mode, with float32 logits.

    Args:
        model: Which model, and in which dtype ("auto": float32 on a CPU, bfloat16 on a GPU).
        device: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N".

    Raises:
        ModelError: the model can't be read, or its weights and its architecture don't match.
        UnsupportedError: its layers or its output head are of a kind that kveval does not know.
    """
    import torch
    from transformers import AutoModelForCausalLM

    resolved = resolve(model)
    folder = _local_folder(resolved, weights=True)
    tokenizer, target = _tokenizer(folder), _device(device)
    info = _describe(model, resolved, folder, tokenizer, target)
    with _readable(folder, "model"), _unreported():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, info.compute_dtype),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # only so that `_require_all_keys` can name them
        )
    network, found = loaded
    _require_all_keys(model.id, found)
    network = network.to(target).eval().requires_grad_(False)
    logits_in_float32(network)
    return LoadedModel(model=network, tokenizer=tokenizer, info=info, device=target)


def logits_in_float32(model: PreTrainedModel) -> None:
    """Give `model` an output head of its own that works in float32, in place.

    A bfloat16 logit has 8 bits, so near-ties and small differences of log-probability vanish in it. Casting
    finished logits would be too late. With a float32 head, what the model does to its logits afterwards
    (a softcap, a scale) runs in float32 too. Costs vocabulary x hidden size x 4 bytes; the head is untied
    from the input embedding, which keeps its dtype.

    Raises:
        UnsupportedError: the model's output head is no linear layer.
    """
    import torch

    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, torch.nn.Linear):
        raise UnsupportedError(
            f"{type(model).__name__} has an output head of type {type(head).__name__}, not a linear layer; "
            "kveval can't compute its logits in float32.",
            remedy="Use a causal language model with a linear output head.",
        )
    if head.weight.dtype == torch.float32:
        return
    wide = copy.deepcopy(head).to(torch.float32).requires_grad_(False)
    wide.register_forward_pre_hook(lambda _module, args: (args[0].to(torch.float32), *args[1:]))
    model.set_output_embeddings(wide)  # type: ignore[no-untyped-call]
    if model.get_output_embeddings() is not wide:  # type: ignore[no-untyped-call]
        raise UnsupportedError(
            f"{type(model).__name__} does not let its output head be replaced.",
            remedy="Set `dtype: float32`.",
        )
    model.config.get_text_config(decoder=True).tie_word_embeddings = False
    model.config.tie_word_embeddings = False  # else whoever ties weights again would undo it


def _resolve_packaged(name: str) -> ResolvedModel | None:
    if name not in known_models():
        return None
    folder = models_dir() / name
    present = read_manifest(folder) is not None
    return ResolvedModel(kind="packaged", location=str(folder), revision=None, is_present=present)


def _resolve_path(name: str) -> ResolvedModel | None:
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"folder {name!r} has no config.json, so it holds no transformers model.",
                remedy="Name the folder that `save_pretrained` wrote.",
            )
        return ResolvedModel(kind="folder", location=str(path), revision=None, is_present=True)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"file {name!r} is no .gguf file.", remedy="Name a .gguf file, or a model's whole folder.")
        folder = gguf_folder(cached_sha256(path))
        present = read_manifest(folder) is not None
        return ResolvedModel(kind="gguf", location=str(path), revision=None, is_present=present)
    if name.startswith((".", "/", "~")) or name.lower().endswith(".gguf"):
        raise ModelError(f"model path {name!r} does not exist.", remedy="Check the path.")
    return None


def _local_folder(resolved: ResolvedModel, *, weights: bool) -> Path:
    """The transformers folder of a model; downloads or converts it if need be."""
    if resolved.kind == "hub":
        return hub_folder(resolved.location, resolved.revision, weights=weights)
    if resolved.kind == "gguf":
        path = Path(resolved.location)
        return convert(path, cached_sha256(path), report=_log.info)
    folder = Path(resolved.location)
    if not resolved.is_present:
        raise ModelError(
            f"model {folder.name!r} is not on this machine yet.",
            remedy=f"Run `kveval models fetch {folder.name}`.",
        )
    return folder


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    with _readable(folder, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    return tokenizer


def _config_digest(folder: Path) -> str:
    """Digest of the file as it stands, without the keys that only say who wrote it."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return digest(
        "model-config", {k: v for k, v in config.items() if k not in ("transformers_version", "_name_or_path")}
    )


def _describe(
    model: ModelSpec,
    resolved: ResolvedModel,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> ModelInfo:
    from transformers import AutoConfig

    with _readable(folder, "config"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).to_dict()
    text = text_config(config)
    if resolved.kind == "hub":
        revision, weights_digest = folder.name, folder.name
        weights_bytes = hub_weights_bytes(resolved.location, folder)
    else:
        revision, weights_digest = None, _weights_digest(folder)
        weights_bytes = sum(path.stat().st_size for path in weight_files(folder))
    template = tokenizer.chat_template
    uses_template = bool(template) and model.chat_template != "none"
    auto_dtype = "float32" if device.type == "cpu" else "bfloat16"
    return ModelInfo(
        id=model.id,
        revision=revision,
        source=resolved.kind,
        weights_digest=weights_digest,
        config_digest=_config_digest(folder),
        template_digest=digest("chat-template", template) if uses_template else "none",
        tokenizer_digest=_tokenizer_digest(tokenizer),
        max_context=_max_context(text),
        vocab_size=int(text["vocab_size"]),
        geometry=geometry_from_config(config),
        weights_bytes=weights_bytes,
        compute_dtype=auto_dtype if model.dtype == "auto" else model.dtype,
        has_chat_template=bool(template),
    )


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {name!r}.", remedy=_DEVICES) from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"kveval does not run on device {name!r}.", remedy=_DEVICES)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name!r} was asked for, and PyTorch sees {torch.cuda.device_count()} GPUs here.",
            remedy="Use `device: cpu`, or install a CUDA build of torch on a machine with an NVIDIA GPU.",
        )
    return device


def _max_context(text: Mapping[str, Any]) -> int | None:
    keys = ("max_position_embeddings", "n_positions", "max_seq_len")
    found = next((text[key] for key in keys if text.get(key)), None)
    return None if found is None else int(found)


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest of what the tokenizer does: the whole pipeline of a fast one, else class and vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = type(tokenizer).__name__ if backend is None else backend.to_str()
    return digest("tokenizer", [rules, tokenizer.get_vocab() if backend is None else None])


def _weights_digest(folder: Path) -> str:
    """Digest over the sha256 of every weight file.

    Raises:
        ModelError: a folder that kveval converted no longer holds what was converted.
    """
    sums = {path.name: cached_sha256(path) for path in weight_files(folder)}
    manifest = read_manifest(folder)
    if manifest is not None and sums != {k: v["sha256"] for k, v in manifest["weights"].items()}:
        raise ModelError(
            f"the weights in {folder} are not those that were converted: the folder is damaged.",
            remedy=f"Delete {folder} and fetch or load the model again.",
        )
    return digest("weights", sums)


@contextmanager
def _readable(folder: Path, what: str) -> Iterator[None]:
    """Turn what transformers raises about an unreadable model into a ModelError; no progress bars."""
    from transformers.utils import logging as transformers_logging

    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ModelError(
            f"can't load the {what} from {folder}: {error}",
            remedy="Check that the folder is complete, and that this transformers version knows the model.",
        ) from error
    finally:
        if had_bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def _unreported() -> Iterator[None]:
    """Keep transformers from listing surplus weights: `_require_all_keys` refuses those that matter, by name."""

    def matters(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "LOAD REPORT" not in text or any(word in text for word in ("MISSING", "MISMATCH", "CONVERSION"))

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(matters)
    try:
        yield
    finally:
        logger.removeFilter(matters)


def _require_all_keys(name: str, found: Mapping[str, Any]) -> None:
    """Refuse weights that don't match the architecture: a random layer makes every figure void.

    Scales of a narrow cache are no weights; which of them are used is the plan's business.
    """
    surplus = [key for key in found["unexpected_keys"] if not checkpoint_scales.is_scale(key)]
    unused = sorted(key for key in surplus if checkpoint_scales.is_unused_scale(key))
    if unused:
        _log.warning(
            "model %r carries %d scales for narrow queries or probabilities (%s, ...); kveval keeps these wide.",
            name, len(unused), unused[0],
        )  # fmt: skip
    found = {**found, "unexpected_keys": set(surplus).difference(unused)}
    problems = [
        f"{len(names)} {kind.removesuffix('_keys')} ({', '.join(sorted(map(str, names))[:3])})"
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
        if (names := found.get(kind))
    ]
    if problems:
        raise ModelError(
            f"model {name!r}: weights and architecture don't match: {'; '.join(problems)}.",
            remedy="Check that config.json and the weights belong together.",
        )
