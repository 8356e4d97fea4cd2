"""Masks of plain causal and sliding attention that take no memory until something looks at them.

The mask of 8K queries over 128K keys is 1 GiB; what it says is a window and, for a left-padded batch, where each row
begins.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

__all__ = ["CausalMask", "causal_mask"]


class CausalMask(Tensor):
    """A mask bool [B, 1, Lq, Lk] of the last Lq of Lk tokens, each of which sees itself and those before it.

    Any operation that meets it makes the whole mask (through `__torch_dispatch__`), once for all layers that share it.
    """

    window: int
    """Tokens that one sees, its own included; 0: all."""
    padding: tuple[int, ...] | None
    """Tokens at the start of each row that nothing sees; None: none in any row."""
    _make: Callable[[], Tensor]
    _whole: Tensor | None
    _bounds: dict[tuple[int, int], Tensor]

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, int, int, int],
        make: Callable[[], Tensor],
        *,
        window: int,
        padding: tuple[int, ...] | None,
        device: torch.device,
    ) -> CausalMask:
        """A mask of this shape; `make` makes the whole of it."""
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        self.window, self.padding = window, padding
        self._make, self._whole, self._bounds = make, None, {}
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CausalMask(shape={tuple(self.shape)}, window={self.window}, padding={self.padding})"

    def whole(self) -> Tensor:
        """The mask as a plain tensor, which is kept."""
        if self._whole is None:
            self._whole = self._make()
        return self._whole

    def bounds(self, start: int, tokens: int) -> Tensor | None:
        """int32 [B, 2]: of `tokens` tokens from `start` on, the first that is seen and the one after the last.

        None where all are.
        """
        if self.padding is None or max(self.padding) <= start:
            return None
        if (start, tokens) not in self._bounds:
            rows = [(max(0, pad - start), tokens) for pad in self.padding]
            self._bounds[start, tokens] = torch.tensor(rows, dtype=torch.int32, device=self.device)
        return self._bounds[start, tokens]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def plain(value: Any) -> Any:
            return value.whole() if isinstance(value, CausalMask) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


def causal_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor | None:
    """The mask function that kveval registers with transformers; arguments are those of its `sdpa_mask`.

    Returns:
        What `sdpa_mask` returns, but a `CausalMask` in place of a mask that is causal, or causal with a window, over
        rows that are padded on the left or not at all.
    """

    def made(skip: bool) -> Any:
        return sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, local_size=local_size,
            allow_is_causal_skip=skip, device=device, **options,
        )  # fmt: skip

    window = _window(mask_function, local_size)
    last_queries = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if window is None or not last_queries or torch.compiler.is_compiling():
        return made(allow_is_causal_skip)  # type: ignore[no-any-return]
    padding: tuple[int, ...] | None = (0,) * batch_size
    if attention_mask is not None:
        padding = _left_padding(attention_mask, batch_size, kv_offset, kv_offset + kv_length)
    if padding is None:
        return made(allow_is_causal_skip)  # type: ignore[no-any-return]
    all_within = not window or kv_length < window
    if allow_is_causal_skip and not any(padding) and all_within and q_length in (1, kv_length):
        return None
    shape = (batch_size, 1, q_length, kv_length)
    return CausalMask(
        shape,
        lambda: made(False),
        window=0 if all_within else window,
        padding=padding if any(padding) else None,
        device=torch.device(device),
    )


def _window(mask_function: Callable[..., Any], local_size: int | None) -> int | None:
    """The window of a causal pattern, 0 if it has none; None for any other pattern, and for one not recognised."""
    if _same(mask_function, causal_mask_function):
        return 0
    if local_size is not None and _same(mask_function, sliding_window_causal_mask_function(local_size)):
        return local_size
    return None


def _same(one: Any, other: Any) -> bool:
    """Whether two functions are one piece of code with equal variables around it; or two values are equal."""
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        around = ([cell.cell_contents for cell in f.__closure__ or ()] for f in (one, other))
        return one.__code__ is other.__code__ and _same(*map(tuple, around))
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, int) and isinstance(other, int) and one == other


def _left_padding(mask: Tensor, batch: int, start: int, stop: int) -> tuple[int, ...] | None:
    """Padding at the start of each row of columns `start` to `stop`; None if something else is hidden too.

    Waits for the device, as transformers' own masks do for such a mask.
    """
    if mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] < stop:
        return None
    seen = mask[:, start:stop].bool()
    padding = (~seen).sum(1)
    expected = torch.arange(stop - start, device=seen.device) >= padding[:, None]
    *rows, equal = torch.cat([padding, (seen == expected).all()[None]]).tolist()
    return tuple(rows) if equal else None
