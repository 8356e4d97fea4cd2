"""Models from the Hugging Face hub, as folders of its client's cache."""

from __future__ import annotations

from pathlib import Path

from kveval.errors import ModelError
from kveval.model_cache import weight_files, weight_names
from kveval.model_fetch import known_models

__all__ = ["hub_folder", "hub_is_present", "hub_weights_bytes"]

_TEXT = ("*.json", "*.jinja", "*.model", "*.txt")
_WEIGHTS = ("model*.safetensors",)


def hub_folder(repo: str, revision: str | None, *, weights: bool, local_only: bool = False) -> Path:
    """The folder of a repository in the hub client's own cache, downloaded if need be.

    Args:
        repo: Owner and name.
        revision: Branch, tag or commit; None is the default branch.
        weights: Also the weights, not only the config and the tokenizer.
        local_only: Ask no network.

    Returns:
        A folder whose name is the commit hash.

    Raises:
        ModelError: the repository, the revision or the network can't be reached.
    """
    from huggingface_hub import snapshot_download

    patterns = [*_TEXT, *(_WEIGHTS if weights else ())]
    try:
        folder = snapshot_download(repo, revision=revision, allow_patterns=patterns, local_files_only=local_only)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"can't get model {repo!r} from the hub: {error}",
            remedy="Check the name, the network and, for a gated model, your access; or use a model "
            f"that comes from a package index: {', '.join(known_models())}.",
        ) from error
    return Path(folder)


def hub_is_present(repo: str, revision: str | None) -> bool:
    """Whether the weights of a repository are in the hub client's cache, all of them."""
    try:
        return bool(weight_files(hub_folder(repo, revision, weights=True, local_only=True)))
    except ModelError:  # the answer to the question asked, not a failure
        return False


def hub_weights_bytes(repo: str, folder: Path) -> int:
    """Bytes of a hub model's weights: of the files in `folder` if all are there, else as the hub lists them.

    Raises:
        ModelError: the hub can't be asked, or lists no safetensors.
    """
    from huggingface_hub import HfApi

    names = weight_names(folder)
    if all((folder / name).is_file() for name in names):
        return sum((folder / name).stat().st_size for name in names)
    try:
        listed = HfApi().get_paths_info(repo, list(names), revision=folder.name)
    except OSError as error:
        raise ModelError(
            f"can't learn the size of the weights of {repo!r}: {error}",
            remedy="Check the network, or download the model first.",
        ) from error
    sizes = {entry.path: entry.size for entry in listed if hasattr(entry, "size")}
    if set(sizes) != set(names):
        raise ModelError(
            f"hub model {repo!r} has no {', '.join(sorted(set(names) - set(sizes)))}.",
            remedy="kveval reads safetensors; use a revision or a copy of the model that has them.",
        )
    return sum(sizes.values())
