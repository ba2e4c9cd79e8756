"""Gated short convolution as a mixer (LFM2).

    b, c, x = projection(input)         column-parallel; b, c and x have h channels each
    y = c · convolution(b · x)          causal, in each channel over the last tokens
    output = projection(y)              row-parallel

Shapes: s sequence length, b micro-batch size, h hidden size; n channels on this rank.
"""

from __future__ import annotations

from torch import Tensor

from megafp8.layers.build import PartBuild
from megafp8.layers.costs import KernelWork, MicroBatch
from megafp8.layers.mixer import RecurrentInputs
from megafp8.layers.recurrent.module import ConvolvedMixer
from megafp8.layers.recurrent.op import State
from megafp8.layers.short_convolution.op import convolve, last_inputs
from megafp8.layers.short_convolution.record import ShortConvolutionConfig
from megafp8.linear.fusion import LinearInput


class ShortConvolution(ConvolvedMixer):
    """Mixer that multiplies a short causal convolution by gates before and after it."""

    def __init__(self, build: PartBuild[ShortConvolutionConfig]) -> None:
        super().__init__()
        h = build.model.hidden_size
        self.projection = build.column("bcx", dict.fromkeys("bcx", h))
        self.input_linear = self.projection.state
        self.add_convolution(build, {"x": h})
        self.proj = build.row(h)

    def forward(self, x_sbh: Tensor | LinearInput, inputs: RecurrentInputs) -> Tensor:
        """Return the output of the mixer in the shape of its input. Collective."""
        b_sbn, c_sbn, x_sbn = self.projection(x_sbh).chunk(3, dim=-1)
        return self.proj(c_sbn * self.run(inputs, b_sbn * x_sbn))

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Empty shape: the mixer has no S, only last inputs."""
        return ()

    def advance(self, xs: tuple[Tensor, ...], state: State, starts_sb: Tensor | None) -> tuple[Tensor, State]:
        """Advance the convolution; return the outputs `[s, b, n]` and the new state."""
        (x_sbn,), (last_btn,) = xs, state
        y_sbn = convolve(x_sbn, self.convolution[:, 0], last_btn, starts_sb)
        return y_sbn, (last_inputs(x_sbn, last_btn.shape[1], last_btn, starts_sb),)

    # --- what it keeps and computes ---------------------------------------------------------------------------------

    def saved(self, batch: MicroBatch) -> dict[str, int]:
        """Return the bytes saved for backward, by tensor."""
        channel_bytes = batch.tokens * len(self.convolution) * batch.element
        return {
            "bcx input": batch.saved_input(self.projection.state),
            "b, c, x": 3 * channel_bytes,
            "convolution's input": channel_bytes,
            "convolution's output": channel_bytes,
            "proj input": batch.saved_input(self.proj.state),
        }

    def work(self, batch: MicroBatch) -> KernelWork:
        """Return the work of passes over channels: 6 for the gates, 3 for the current token, 5 per earlier token."""
        n, _, k = self.convolution.shape
        moved = batch.tokens * n * (9 + 5 * (k - 1)) * batch.element
        return KernelWork(moved, 3 * moved, kernels=5 + 2 * k, more_in_backward=5 + 4 * k)

    @property
    def rule_flops(self) -> float:
        """Model FLOPs of S per token: zero, because there is no S."""
        return 0.0
