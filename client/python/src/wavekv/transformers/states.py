"""What a WaveKVCache hands to the model in place of the keys and values it keeps elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from wavekv.transformers.store import Store

# Why torch.compile stops at the functions that talk to the daemon.
NOT_COMPILED = "a WaveKVCache attends in another process: torch.compile cannot see into it"

# What a model may ask of keys that it only passes on.
_HARMLESS = frozenset({"shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad"})
_HARMLESS_METHODS = frozenset({"size", "dim", "__len__", "__repr__"})


class NewStates(torch.Tensor):
    """The new tokens' keys or values [batch, kv_heads, new_tokens, dim] on the way to attention.

    The earlier tokens' are not in it, so that any attention but "wavekv" would compute over the
    wrong tokens: every operation on it is an error that says so.

    Attributes:
      store, layer: where the tokens belong.
    """

    store: Store
    layer: int

    @staticmethod
    def wrap(states: torch.Tensor, store: Store, layer: int) -> NewStates:
        wrapped = states.detach().as_subclass(NewStates)
        wrapped.store = store
        wrapped.layer = layer
        return wrapped

    def unwrap(self) -> torch.Tensor:
        """Returns the plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _HARMLESS_METHODS or (name == "__get__" and attribute in _HARMLESS):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise RuntimeError(
            f"{attribute or name or func}: the keys and values of a WaveKVCache are for the "
            "attention 'wavekv' alone: load the model with attn_implementation='wavekv', and without "
            "torch.compile, which cannot see into another process"
        )
