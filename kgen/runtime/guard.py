"""Whether tensors are laid out as those of an earlier call: `same_as`, asked once a call.

Takes tensors, touches no data, imports torch only. PyTorch's compiler guards its code with a check
of types, shapes, strides, devices, views and gradients in one call of 0.5 us for five tensors; to
ask for them one by one from Python takes 2.5. The check is not a public name of torch: where it is
missing or has changed, Python asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.autograd.graph import increment_version

Same = Callable[..., bool]

#: count_write((tensor,)): tells autograd, which may have saved what the tensor held, that it was
#: written. 0.15 us; the public name takes 0.4.
count_write: Final[Callable[[tuple[torch.Tensor]], None]] = getattr(
    torch._C, "_increment_version", increment_version
)


def layout_of(tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """All that a call depends on but the addresses: equal where a prepared launch is right."""
    return tuple((t.shape, t.stride(), t.dtype, t.device, t.layout, t.is_neg()) for t in tensors)


def same_as(tensors: tuple[torch.Tensor, ...]) -> Same:
    """A check for tensors laid out as these, none of which autograd wants a gradient of.

    Never true for others. May be false for equal ones under another mode of PyTorch (inference,
    autocast) or of another Python class: compare their `layout_of` then, and make a new check.
    """
    # A guard made for a tensor that requires a gradient accepts it also while autograd records.
    if _TensorGuards is not None and not any(t.requires_grad for t in tensors):
        try:
            return _compiled(tensors)
        except (TypeError, SystemError, RuntimeError):
            pass
    return _asked_by_python(tensors)


def _compiled(tensors: tuple[torch.Tensor, ...]) -> Same:
    # None would leave an extent unchecked: every one is named.
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    guards = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Same = guards.check
    if not check(*tensors):
        raise TypeError("a guard that refuses its own tensors is of no use")
    return check


def _asked_by_python(tensors: tuple[torch.Tensor, ...]) -> Same:
    layout = layout_of(tensors)

    def same(*others: torch.Tensor) -> bool:
        wants_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in others)
        return not wants_gradient and layout_of(others) == layout

    return same


def _find_guards() -> Any:
    try:
        from torch._C._dynamo.guards import TensorGuards
    except ImportError:
        return None
    return TensorGuards


_TensorGuards: Final[Any] = _find_guards()
