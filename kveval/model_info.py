"""What is known of a model: plain data that planning and reporting use without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from kveval.geometry import LayerGeometry

__all__ = ["ModelInfo", "ModelSource", "ModelSpec", "ResolvedModel"]

ModelSource = Literal["packaged", "folder", "gguf", "hub"]


class ModelSpec(Protocol):
    """What this module needs to know of a model; `kveval.config.ModelConfig` is one."""

    @property
    def id(self) -> str:
        """Table name, hub id, folder or .gguf file."""

    @property
    def revision(self) -> str | None:
        """Branch, tag or commit of a hub model."""

    @property
    def dtype(self) -> str:
        """Compute dtype: auto, float32, bfloat16 or float16."""

    @property
    def chat_template(self) -> str:
        """The word auto (the tokenizer's own template) or none (raw text)."""


@dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    """Where a model is. `location` is a folder, a .gguf file or a hub repository's id.

    `is_present` says whether its weights are on this machine, ready to load without a network.
    """

    kind: ModelSource
    location: str
    revision: str | None
    is_present: bool


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What a run records about its model; plain data.

    Attributes:
        id: As named in the config.
        revision: Commit hash of a hub model, otherwise None.
        source: Where it came from.
        weights_digest: Digest of the sha256 of each weight file; the commit hash for a hub model.
        config_digest: Digest of config.json: rope, norms, scales, everything that is not a weight.
        template_digest: Digest of the chat template in use, or "none".
        tokenizer_digest: Digest of the tokenizer's vocabulary and rules.
        max_context: Positions that the model was made for, in tokens; None if the config names none.
        vocab_size: Width of the logits.
        geometry: What each layer caches.
        weights_bytes: Bytes of the safetensors files, in the dtype they are stored in.
        compute_dtype: float32, bfloat16 or float16.
        has_chat_template: Whether the tokenizer has one, in use or not.
    """

    id: str
    revision: str | None
    source: ModelSource
    weights_digest: str
    config_digest: str
    template_digest: str
    tokenizer_digest: str
    max_context: int | None
    vocab_size: int
    geometry: tuple[LayerGeometry, ...]
    weights_bytes: int
    compute_dtype: str
    has_chat_template: bool
