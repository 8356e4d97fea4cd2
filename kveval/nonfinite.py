"""NaN and infinity that kernels met while they stored keys and values: noted on the device, read when asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from kveval.errors import MeasurementError

__all__ = ["NonFinite", "nonfinite_error"]

_ROLES = ("keys", "values")


def nonfinite_error(where: str) -> MeasurementError:
    """The error for `where`, such as "keys of layer 3"."""
    return MeasurementError(
        f"{where} got NaN or infinity; a cache that stores it would hide where it came from.",
        remedy="Check the model's dtype (float16 overflows in some models) and its weights.",
    )


class NonFinite:
    """Flags of a cache, int32 [layers, 2] on every device that has layers; 1 where keys, or values, were not finite.

    Writing them waits for nothing. Reading them waits for the device, so it is done once per forward.

    Args:
        layers: How many the cache has.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._flags: dict[torch.device, Tensor] = {}
        self._unread = False

    def of(self, layer: int, device: torch.device) -> Tensor:
        """Flags int32 [2] of a layer, for a kernel to write."""
        flags = self._flags.get(device)
        if flags is None:
            # Made in inference mode, they could not be written outside of it.
            with torch.inference_mode(False):
                flags = self._flags[device] = torch.zeros(self._layers, 2, dtype=torch.int32, device=device)
        self._unread = True
        return flags[layer]

    def check(self, *, unread_only: bool = False) -> None:
        """Refuse what was not finite.

        Args:
            unread_only: Do nothing if no kernel was started since the flags were last read, nor while a CUDA stream is
                captured, which allows no waiting.

        Raises:
            MeasurementError: naming the layer and the role.
        """
        if unread_only and not self._unread:
            return
        for device, flags in self._flags.items():
            if unread_only and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return
            for layer, found in enumerate(flags.tolist()):
                for role, flag in zip(_ROLES, found, strict=True):
                    if flag:
                        raise nonfinite_error(f"{role} of layer {layer}")
        self._unread = False

    def clear(self) -> None:
        """Forget everything that was found."""
        for flags in self._flags.values():
            flags.zero_()
        self._unread = False

    def copy(self) -> NonFinite:
        """Flags of an independent cache with the same tokens."""
        twin = NonFinite(self._layers)
        twin._flags = {device: flags.clone() for device, flags in self._flags.items()}
        twin._unread = self._unread
        return twin
