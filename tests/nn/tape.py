"""Operators recorded and replayed on a CPU in place of CUDA graphs, as strict as they are.

It records the operators that reach the dispatcher, and a replay runs these again on the same memory: whatever Python
would decide again is decided once and for all, and so are addresses and host-side numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")
WAITS = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select"}
UNINITIALIZED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


class TapeCapture:
    """Records and replays; like a graph's capture, recording leaves no trace in memory or random numbers.

    `replays`: of each recording, by all captures that share the list.
    """

    def __init__(self, replays: list[int]) -> None:
        self.replays = replays

    def __call__(self, work: Callable[[], T]) -> Callable[[], T]:
        number = len(self.replays)
        self.replays.append(0)
        tape, random_state = _Tape(), torch.get_rng_state()
        try:
            with tape:
                result = work()
        finally:
            torch.set_rng_state(random_state)
            tape.undo()

        def replay() -> T:
            self.replays[number] += 1
            tape.replay()
            return result

        return replay


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor | None]]] = []
        self._own: dict[int, torch.UntypedStorage] = {}  # memory allocated while recording
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name, schema = kwargs or {}, func._schema.name.split("::")[1], func._schema
        if name in WAITS:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        given = dict(zip((argument.name for argument in schema.arguments), args)) | kwargs
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for x in tree_leaves(given.get(argument.name)):
                    self._keep(x)
        result = func(*args, **kwargs)
        results = result if isinstance(result, (tuple, list)) else [result]
        is_fresh = [isinstance(y, Tensor) and kind.alias_info is None for y, kind in zip(results, schema.returns)]
        memory = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for y in (y for y, fresh in zip(results, is_fresh) if fresh):
            if y.untyped_storage()._cdata not in memory:
                self._own[y.untyped_storage()._cdata] = y.untyped_storage()
        is_view = not any(is_fresh) and not schema.is_mutable
        if not is_view and name not in UNINITIALIZED:
            kept = [y.detach() if fresh else None for y, fresh in zip(results, is_fresh)]
            self._calls.append((func, args, kwargs, kept))
        return result

    def _keep(self, x: Any) -> None:
        """Remember what memory of others is before it is written to."""
        if isinstance(x, Tensor):
            storage = x.untyped_storage()
            if storage._cdata not in self._own:
                self._before.setdefault(storage._cdata, (storage, storage.clone()))

    def undo(self) -> None:
        """Memory of others is as before; that of the tape is all ones, NaN in every floating-point format."""
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()
        self._forget()

    def _forget(self) -> None:
        for storage in self._own.values():
            storage.fill_(255)

    def replay(self) -> None:
        self._forget()
        below = torch._C._AutoDispatchBelowAutograd()
        with torch.no_grad(), torch.autocast("cpu", enabled=False), below:
            for func, args, kwargs, outputs in self._calls:
                result = func(*args, **kwargs)
                for old, new in zip(outputs, result if isinstance(result, (tuple, list)) else [result]):
                    if old is not None:
                        old.copy_(new)
