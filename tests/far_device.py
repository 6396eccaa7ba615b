"""A device that is not there: tensors that say they lie on it, compute on the CPU, and refuse the company of others.

What a GPU refuses, this refuses: tensors of two devices in one operation, a generator of the CPU for numbers that lie
elsewhere, the way to numpy without a copy. A GPU takes an index of the CPU, and in most operations a tensor of a single
number; this takes neither. With `double` false it has no float64, like the GPUs of Apple.

The tensors say that they are on "meta", a device that autograd knows in every build of PyTorch and that nobody computes
on. Autograd, torch.func and vmap run as on any other device: their rules come first, what reaches the device are plain
operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "meta"
MOVES = {"aten._to_copy.default", "aten.copy_.default"}  # from one device to another


class Misplaced(RuntimeError):
    """Tensors of two devices in one operation, or something else that a GPU cannot do."""


class Far(Tensor):
    """A tensor that says it lies on the far device; its numbers lie in `inner`, on the CPU."""

    inner: Tensor  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor) -> Far:
        made: Far = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=NAME,
        )  # fmt: skip
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _computed(func, args, kwargs or {}, double=True)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Far({self.inner!r})"

    def tolist(self) -> Any:
        return self.inner.tolist()

    def numpy(self, **_: Any) -> Any:
        raise Misplaced("can't convert a tensor of the far device to numpy; use .cpu() first")

    def __array__(self, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        return self.numpy()


class _Device(TorchDispatchMode):
    """Makes tensors on the far device where that is asked for."""

    def __init__(self, double: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.double = double
        self.operations = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled: its import would take seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return _computed(func, args, kwargs or {}, self.double)


def _computed(func: Any, args: Any, kwargs: dict[str, Any], double: bool) -> Any:
    wanted = kwargs.get("device")
    tensors = _leaves((*args, *kwargs.values()))
    far = [leaf for leaf in tensors if isinstance(leaf, Far)]
    if not far and (wanted is None or wanted.type != NAME):
        return func(*args, **kwargs)
    name = str(func)
    if name not in MOVES:
        if any(not isinstance(leaf, Far) and leaf.dim() and not _empty(leaf) for leaf in tensors):
            shapes = [(tuple(leaf.shape), str(leaf.device)) for leaf in tensors]
            raise Misplaced(f"{name} of tensors on two devices: {shapes}")
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise Misplaced(f"{name} with a generator of the CPU")
    ends_far = wanted.type == NAME if wanted is not None else isinstance(args[0] if args else None, Far) or bool(far)
    if wanted is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    inner = {id(leaf.inner): leaf for leaf in far}
    out = func(*_mapped(_inside, args), **_mapped(_inside, kwargs))
    if torch.Tag.inplace_view in func.tags:  # another shape, in place
        with torch._C._DisableTorchDispatch():
            func(*args, **kwargs)

    def outside(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in inner:  # in place
            return inner[id(leaf)]
        if not double and leaf.dtype == torch.float64:
            raise Misplaced(f"{name} in float64")
        return Far(leaf)

    if name == "aten.copy_.default":
        return args[0]
    return _mapped(outside, out) if ends_far else out


def _leaves(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _leaves(value)
    return found


def _mapped(function: Any, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_mapped(function, entry) for entry in value)
    if isinstance(value, dict):
        return {name: _mapped(function, entry) for name, entry in value.items()}
    return function(value)


def _inside(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and _empty(leaf):
        return torch.empty(leaf.shape, dtype=leaf.dtype)
    return leaf.inner if isinstance(leaf, Far) else leaf


def _empty(leaf: Tensor) -> bool:
    """A tensor of no numbers, made by PyTorch itself: there is nothing in it to be lost."""
    return not isinstance(leaf, Far) and leaf.device.type == NAME and leaf.numel() == 0


class _Calls(TorchFunctionMode):
    """What the CPU alone can tell of a call: later a number of Python is a tensor like others."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu").type == NAME:
            device = kwargs.pop("device")  # PyTorch would make nothing of them, without asking the device
            return func(*args, **kwargs, device="cpu").to(device)
        tensors = _leaves((*args, *kwargs.values()))
        if func not in _MOVES and len({leaf.device.type for leaf in tensors}) > 1:
            shapes = [(tuple(leaf.shape), str(leaf.device)) for leaf in tensors]
            raise Misplaced(f"{func} of tensors on two devices: {shapes}")
        return func(*args, **kwargs)


_MOVES = (Tensor.to, Tensor.copy_, Tensor.__setitem__, torch._has_compatible_shallow_copy_type)  # the last only asks


@contextmanager
def far_device(double: bool = True) -> Iterator[_Device]:
    """Within it the device "far" is there."""
    with _Calls(), _Device(double) as device:
        yield device
