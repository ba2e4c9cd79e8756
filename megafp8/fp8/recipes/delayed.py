"""The state of delayed scaling: a history of amaxes and a scale for every FP8 tensor of this rank.

All histories are rows of one buffer and all scales elements of another, so that the end of a step is one collective and
a few kernels however many layers there are. Quantizers hold views: they read their scale and raise slot 0 of their
history; only `end_step` moves anything. That is why a recomputed forward, several micro-batches or a pipeline's
interleaving cannot advance the state twice.

A step with an infinite or NaN amax leaves the tensor's scale as it was, and that amax is then forgotten rather than
rolled into the history, where `max` would hold the scale frozen for a whole history length. One bad step costs one
update.

In the first step there is no history. A scale of 1 would lose it: the gradients of a mean over tokens lie below E5M2's
least number, and behind a tensor that vanished the next one is measured wrong, so that it takes several steps until all
are right. In that step every tensor is scaled by its own amax instead, which costs it a pass more over the data and a
reduction where ranks hold slices. Whoever resumes goes on with the history.

Shapes: t tensors, l steps of history; slot 0 is the step now running.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megafp8.distributed.collectives import all_reduce
from megafp8.fp8.formats import Format
from megafp8.fp8.quantizers import DelayedQuantizer
from megafp8.fp8.recipes.base import DelayedScaling
from megafp8.fp8.scaling import amax_of_history, roll_history, scale_from_amax


class DelayedState:
    """Histories `[t, l]` and scales `[t]`, fp32 on `device`, of the tensors `formats` names, in that order."""

    def __init__(
        self,
        recipe: DelayedScaling,
        formats: dict[str, Format],
        device: torch.device,
        groups: dict[str, ProcessGroup | None] | None = None,
    ) -> None:
        """`groups`: of the ranks that hold slices of a tensor, by its name."""
        self.recipe = recipe
        self.formats = formats
        self.history_tl = torch.zeros(len(formats), recipe.amax_history_len, device=device)
        self.scale_t = torch.ones(len(formats), device=device)
        # Four apart: cuBLASLt wants a factor at a multiple of 16 bytes.
        self.scale_inv_t = torch.ones(len(formats), 4, device=device)[:, 0]
        self.fp8_max_t = torch.tensor([fmt.max for fmt in formats.values()], device=device)
        self.step = torch.zeros((), dtype=torch.int64)  # on the host: it decides what end_step launches
        self.quantizers = {
            name: DelayedQuantizer(
                fmt,
                self.scale_t[i],
                self.scale_inv_t[i],
                self.history_tl[i, 0],
                (groups or {}).get(name),
                margin=recipe.margin,
                power_of_two=recipe.power_of_two_scale,
            )
            for i, (name, fmt) in enumerate(formats.items())
        }
        self._set_fresh(True)

    def _set_fresh(self, fresh: bool) -> None:
        for quantizer in self.quantizers.values():
            quantizer.fresh = fresh

    @torch.no_grad()
    def end_step(self, group: ProcessGroup | None) -> None:
        """Reduce the step's amaxes over `group` (one collective), renew the scales if their turn has come, roll.

        Scales are renewed after the first step and every `interval` steps from there.
        """
        if not self.formats:
            return
        newest_t = all_reduce(self.history_tl[:, 0].clone(), group, "max")
        self.history_tl[:, 0] = newest_t
        self._renew(update=self.step.item() % self.recipe.interval == 0)
        self.step += 1
        self._set_fresh(False)

    def _renew(self, *, update: bool) -> None:
        """New scales if `update`, and a new slot 0."""
        algorithm = self.recipe.amax_compute_algo
        if self.history_tl.is_cuda and isinstance(algorithm, str):
            from megafp8.kernels.scales import end_step_  # needs Triton, which comes with torch's CUDA builds

            end_step_(
                self.history_tl, self.scale_t, self.fp8_max_t, margin=self.recipe.margin,
                power_of_two=self.recipe.power_of_two_scale, algorithm=algorithm, update=update,
            )  # fmt: skip
        else:
            if update:
                self.scale_t.copy_(self._scales())
            newest_t = self.history_tl[:, 0]
            newest_t.masked_fill_(~newest_t.isfinite(), 0.0)
            self.history_tl.copy_(roll_history(self.history_tl))
        self._invert_scales()

    def refresh(self) -> None:
        """Renew what follows from histories and scales: to be called when these were read from a checkpoint."""
        self._invert_scales()
        if self.formats:
            self._set_fresh(not bool((self.history_tl != 0).any()) and bool((self.scale_t == 1).all()))

    def _invert_scales(self) -> None:
        self.scale_inv_t.copy_(self.scale_t.reciprocal())

    def _scales(self) -> Tensor:
        return scale_from_amax(
            amax_of_history(self.history_tl, self.recipe.amax_compute_algo),
            self.fp8_max_t,
            margin=self.recipe.margin,
            power_of_two=self.recipe.power_of_two_scale,
            previous=self.scale_t,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Views of the buffers by global name: `fp8.<tensor>.amax_history` `[l]` and `fp8.<tensor>.scale` `[]`.

        With `interval` > 1 also `fp8.step` `[]`, int64 on the host. Reading into these tensors loads them.
        """
        state: dict[str, Tensor] = {}
        for i, name in enumerate(self.formats):
            state[f"fp8.{name}.amax_history"] = self.history_tl[i]
            state[f"fp8.{name}.scale"] = self.scale_t[i]
        if self.recipe.interval > 1:
            state["fp8.step"] = self.step
        return state
