"""Names that other packages add: entry points, loaded only when their name is asked for."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any

from kveval.errors import ConfigError

__all__ = ["load_plugin", "plugin_names", "refuse_claims"]


@cache
def plugin_names(group: str) -> tuple[str, ...]:
    """Names that installed packages register under the entry point group `group`, sorted."""
    return tuple(sorted(entry_points(group=group).names))


def load_plugin(group: str, name: str) -> Any:
    """The object that an installed package registers as `name`.

    Raises:
        ConfigError: if two packages claim the name, or the package can't be imported.
    """
    found = entry_points(group=group, name=name)
    if len(found) != 1:
        raise ConfigError(
            f"{name!r} of {group} is claimed by {_owners(group, name)}.", remedy="Uninstall all but one of them."
        )
    (entry,) = found
    try:
        return entry.load()
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ConfigError(
            f"the entry point {name} = {entry.value} of {group} can't be loaded: {error}",
            remedy="Mend or uninstall the package that registers it.",
        ) from error


def refuse_claims(group: str, name: str) -> None:
    """See that no installed package registers `name`, which is kveval's own.

    Raises:
        ConfigError: naming the packages that do.
    """
    if name in plugin_names(group):
        raise ConfigError(
            f"{name!r} of {group} is kveval's own, and is claimed by {_owners(group, name)}.",
            remedy="Uninstall that package, or have it register another name.",
        )


def _owners(group: str, name: str) -> str:
    return ", ".join(sorted(ep.dist.name if ep.dist else ep.value for ep in entry_points(group=group, name=name)))
