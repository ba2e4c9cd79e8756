"""One seed, any layout, one model: however a run is executed, its losses, gradient norms and state are the plain run's.

A run is given by a preset (`presets.py`), and compared in one of two ways.

*With one rank* (`QUICK_CASES`, `OPTIONS`): the same model, batches and recipe, everything about its execution at its
default. Sums are made in another order, so the comparison is as sharp as the arithmetic allows (`tolerances`):

    fp32             losses and gradient norms to 1e-5, relative
    fp64             to 1e-11, since nothing is summed in less; with FP8 too, where a wrong amax group cannot hide.
                     Shards that cut through blocks of 128 have scales, powers of two, of their own and with them other
                     subnormal values: 1e-8 and 1e-6, and from the third step on, as values move over boundaries of FP8,
                     2e-3 and 2e-2
    FP8, fp32 sums   losses to 2e-3
    bf16, fp16       weights of 16 bits: losses to 2e-3, norms to 2e-2. Moments rounded to 8 bits, or to 4 at random, as
                     FP8. Gradients that are reduced in bf16 or FP8 are other gradients, whose norm is the same to 2e-2
                     and whose first loss, before any update, is the same to 1e-5. FP8 rounds each element that is sent
                     by 1/16 at most, by 1/40 in the root mean square (uniform in a step of 1/8 at magnitudes 1 to 2),
                     and independently; so the norm changes by half the square of that, 3e-4, less for the own shard

*With the same run without an option* (`BITS`), where no sum is made in another order: curve and final state (weights,
moments, masters, FP8 scales and amaxes) are the same bit for bit. `SUMS`: where only the order of a few sums differs.

CUDA graphs are replayed by a stand-in (`runs.RerunCapture`). Most cases are marked slow.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from megafp8.config import Config, ConfigError, check_layout
from tests.marks import slow_but
from tests.training.presets import *  # noqa: F403
from tests.training.presets import VOCABULARY, Preset, config_of, joined, without_execution
from tests.training.runs import EVALUATED, STEPS, Curve, Runs, _train, assembled, batches, check_config, start
from tests.world import World

# --- against one rank ------------------------------------------------------------------------------------------------

FP8 = {DELAYED, CURRENT, ROWWISE, BLOCKWISE, MXFP8, NVFP4, CALIBRATED, STATIC, CUSTOM}
LOOSE = (2e-3, 2e-2)


def tolerances(preset: Preset) -> tuple[tuple[float, float], tuple[int, int]]:
    """Relative tolerance of losses and norms, and for how many steps each is that sharp; after that it is `LOOSE`."""
    parts = {*preset.parts}
    sharp = (math.inf, math.inf)
    if parts & {BF16_MOMENTS, FP8_MOMENTS}:
        sharp = (2, 2)
    if BLOCKWISE in parts:
        sharp = (2, 1)
    if BF16_REDUCE in parts:
        sharp = (1, 0)
    if parts & {BF16, FP16} or (parts & FP8 and FP64 not in parts):
        sharp = (0, 0)
    exact = (1e-8, 1e-6) if BLOCKWISE in parts else (1e-11, 1e-11)
    return exact if FP64 in parts else (1e-5, 1e-5), sharp


def assert_close_to_one_rank(runs: Runs, preset: Preset, steps: int = 2) -> None:
    expected, found = runs.one_rank(preset, steps).curve, runs.of(preset, steps).curve
    if TEXT not in preset:
        assert expected[-1][0] < expected[0][0], "the reference does not learn"
    exact, sharp = tolerances(preset)
    for step, pair in enumerate(zip(found, expected, strict=True)):
        for i, (a, b) in enumerate(zip(*pair)):
            what = f"{('loss', 'norm')[i]} of step {step}"
            assert a == pytest.approx(b, rel=exact[i] if step < sharp[i] else LOOSE[i]), what


WHOLE_STEPS = [
    MUON | TP2 | DP2 | ZERO | LOSS_PARTS, DELAYED | MOE | DP2 | FSDP, MOE | DP2 | EP2 | FSDP | LOSS_PARTS,
    PP2 | DP2 | CLIP | AVERAGE, TP2 | CP2 | QK_CLIP | LOSS_PARTS,
    DP4 | HSDP | TIED | CLIP, HSDP | MOE_6 | DP4 | EP2 | LATE_GATHER,
]  # fmt: skip


@pytest.mark.parametrize("preset", slow_but(WHOLE_STEPS, WHOLE_STEPS[0]))
def test_weights_and_optimizer_state_are_those_of_one_rank_in_float64(world4: World, preset: Preset) -> None:
    one_rank = config_of(FP64, **without_execution(preset))
    (expected,) = (assembled([x.shards]) for x in world4.run(_train, one_rank, 2, ranks=1))
    ranks = world4.run(_train, config_of(FP64 | preset), 2, ranks=preset.ranks)
    found = assembled(rank.shards for rank in ranks)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        difference = (found[name] - values).double().abs().max()
        assert difference <= 1e-11 * values.double().abs().max(), name
        assert values.dtype == torch.float64 or name.startswith("fp8.") or "router" in name


def product(*presets: Sequence[Preset]) -> list[Preset]:
    """All combinations of one from each."""
    return [joined(chosen) for chosen in itertools.product(*presets)]


LAYOUTS = [TP2 | NO_SP, TP2, PP2, LAYERS_4 | PP4 | SAMPLES_4, DP2, TP2 | PP2, DP2 | PP2]
UNEVEN = [LAYERS_4 | PP2 | STAGES_1_3, LAYERS_4 | TP2 | PP2 | STAGES_3_1]
CONTEXT = [CP2, CP4, DP2 | CP2, TP2 | NO_SP | CP2, TP2 | CP2, PP2 | CP2]
EXACT_FP8 = [FP64 | CURRENT, FP64 | DELAYED]
QUICK_CASES = [  # what mixers and parts compute in layouts, tests.models.test_gpt compares
    LAYERS_4 | PP4 | SAMPLES_4 | DOCUMENTS, TP2 | NO_SP | GPT2 | TIED | LOSS_PARTS, DP2 | MASKED,  # fp32
    LORA | DP2 | ANSWERS,
    MOE | CP2 | ETP2 | FP64 | CURRENT | LOSS_PARTS,  # experts
    TP2 | CHUNKS | FP64 | DELAYED | SELECTIVE | LOSS_PARTS,  # FP8 with fp64 sums
    NEMOTRON | TP2 | EP2 | DOCUMENTS,
    T5 | PP2 | FP16 | DROPOUT | LOSS_PARTS,  # an encoder and a decoder
    MUON | GROUPS | DP2 | ZERO, BALANCED | TEXT | DP2 | FP64,
]  # fmt: skip
SLOW_CASES = [
    *product([LOSS_PARTS | FP64], [TP2, TP2 | NO_SP, PP2, LAYERS_4 | PP4 | SAMPLES_4, DP2, TP2 | PP2, CP2, CP4, NONE]),
    *product([LOSS_PARTS | FP64], [TP2 | CP2, DP2 | FSDP, TP2 | DP2 | FSDP | TIED, DP4 | HSDP, DP2 | ZERO]),
    *product([LOSS_PARTS | FP64], [PP2 | ZB_H1, LAYERS_4 | PP2 | ZB_V, LAYERS_4 | PP2 | DUALPIPEV]),
    *product([LOSS_PARTS | FP64], [MOE | DP2 | EP2, MOE | TP2 | EP2, LAYERS_4 | PP2 | INTERLEAVED, TIED | TP2 | PP2]),
    *product([LOSS_PARTS | FP64 | DOCUMENTS], [MTP | TP2 | PP2, TP2 | MICRO2, GEMMA | TP2, DP2 | CP2]),
    *product([LOSS_PARTS | FP64], [BERT | TP2, BERT_PRE | TP2 | CP2, T5 | TP2 | PP2, LORA | TP2, DP2 | ANSWERS]),
    LOSS_PARTS | GRAPHS, LOSS_PARTS | TP2 | FP16, LOSS_PARTS | DP2 | BF16 | ZERO,
    DP2 | ANSWERS, LORA | TP2, DEEPSEEK | DP2 | EP2, NEMOTRON | TP2 | PP2 | EP2 | DOCUMENTS,
    MUON | GROUPS | TP2 | DP2 | ZERO,
    *product([DROPOUT | TP2 | CP2, MTP | TP2 | PP2, HYBRID | TP2 | PP2, SPARSE | TP2 | PP2], [DOCUMENTS]),
    PREFIX | LAYERS_4 | PP2 | FULL, TP2 | CP2 | FP64 | CALIBRATED, DP2 | PP2 | FP16 | ZERO | DELAYED,
    UNEVEN[1] | GPT2 | TIED, MTP | DROPOUT | TP2 | PP2 | DOCUMENTS, PREFIX | LAYERS_4 | TP2 | PP2 | MASKED,
    LORA | TP2 | DP2 | ZERO | ANSWERS, MOE | DROPOUT | FP64 | CURRENT | TP2 | CP2 | ETP2,
    DEEPSEEK | TP2 | DP2 | EP4 | ZERO | DELAYED | FP8_GATHER | NO_TRANSPOSES, CP2 | FP64 | WIDE | SEQ256 | BLOCKWISE,
    DP2 | PP2 | GPT2 | TIED, CP4 | WINDOW, LORA | FP64 | DELAYED | TP2 | PP2, TP2 | PP2 | FP64 | CURRENT,
    DP4 | HSDP | FP8_GATHER | DELAYED, BERT | TP2 | PP2 | SAMPLES_4 | DROPOUT, MUON | GROUPS | TP2 | PP2 | DP2 | ZERO,
    *product([HYBRID], [TP2, TP2 | NO_SP, PP2 | ZB_H1, LAYERS_4 | PP2 | ZB_V, DP2 | ZERO, DP2 | FSDP, FULL]),
    *product([HYBRID], [OFFLOAD, TP2 | SELECTIVE, TP2 | FP64 | DELAYED, FP64 | CURRENT | DP2, GRAPHS, MOE | DP2 | EP2]),
    *product([KIMI], [TP2 | PP2 | DOCUMENTS, DP2 | ZERO, DP2 | FSDP, FULL, TP2 | SELECTIVE | DELAYED, CP2 | MUON]),
    *product([DELTA_PRODUCT], [TP2 | PP2 | DOCUMENTS, DP2 | FSDP, TP2 | SELECTIVE | FP64 | DELAYED, CP2 | MUON]),
    *product([COMPRESSED], [TP2 | PP2 | DOCUMENTS, DP2 | ZERO, DP2 | FSDP, FULL, OFFLOAD, TP2 | SELECTIVE]),
    *product([COMPRESSED], [TP2 | FP64 | DELAYED, CP2 | MUON]),
    HYBRID | MUON | DP2 | ZERO, HYBRID | CP4, HYBRID | TP2 | CP2 | DOCUMENTS, HYBRID | CP2 | PP2 | FULL | DELAYED,
    *product([GEMMA4 | PER_LAYER], [DP2 | FSDP, DP2 | ZERO, OFFLOAD, FULL, TP2 | CP2, TP2 | SELECTIVE | DELAYED]),
    GEMMA4 | PER_LAYER | GRAPHS,
    *product([GEMMA4], [SEPARATE_NORMS | TP2 | PP2 | STAGES_1_3 | EP2, PP2 | STAGES_1_3 | ZB_H1]),
    *product([GEMMA4], [TP2 | PP2 | STAGES_1_3 | FULL, TP2 | NO_SP]),
    *product([NEMOTRON], [TP2 | EP2, PP2 | ZB_V, PP2 | INTERLEAVED, DP2 | EP2 | ZERO, DP2 | FSDP]),
    *product([NEMOTRON], [FULL, OFFLOAD, TP2 | SELECTIVE, TP2 | FP64 | DELAYED, BF16 | GRAPHS, CP2 | DROPOUT]),
    *product([SHARED_ATTENTION], [DP2 | FSDP, TP2 | DP2 | FSDP, DP2 | ZERO, DP4 | HSDP, FULL, OFFLOAD, GRAPHS, MUON]),
    *product([SHARED_ATTENTION | FP64], [TP2 | CP2 | DOCUMENTS, TP2 | DP2 | FSDP, TP2 | SELECTIVE | DELAYED]),
    SHARED_ATTENTION | BF16 | DP2 | ZERO | TIED,
    *product([SHARED_ATTENTION | FP8_GATHER], [DP2 | FSDP | DELAYED, DP2 | ZERO | CURRENT]),
    *product([HYPER], [LAYERS_4 | PP2 | ZB_V, DP2 | ZERO, DP2 | FSDP, OFFLOAD, FULL, MUON]),
    *product([HYPER], [TP2 | SELECTIVE | FP64 | DELAYED, BF16 | GRAPHS, LORA | TP2, FP16 | DP2 | EP2]),
    HYPER | TP2 | PP2 | EP2 | DROPOUT, HYPER | TP2 | CP2 | DOCUMENTS | FP64,
    *product([BLOCK_SPARSE], [TP2 | NO_SP, CP2 | MASKED, PP2 | ZB_H1, DP2 | ZERO, DP2 | FSDP, FULL, OFFLOAD]),
    *product([BLOCK_SPARSE], [TP2 | SELECTIVE, TP2 | CP2 | FP64 | DELAYED, TP2 | PP2 | DOCUMENTS, MTP | PP2, LORA]),
    *product([SPARSE], [TP2 | NO_SP, CP2 | MASKED, PP2 | ZB_H1, DP2 | ZERO, DP2 | FSDP, FULL, TP2 | SELECTIVE]),
    *product([SPARSE], [OFFLOAD, TP2 | CP2 | FP64 | DELAYED, FP16 | DP2, MUON | DP2 | ZERO, MTP | PP2 | TP2]),
    DROPOUT | MICRO2 | DP2 | PP2 | DOCUMENTS, PP2 | CP2 | MASKED, TP2 | PP2 | FP64 | DELAYED, DP2 | FP64 | DELAYED,
    T5 | TP2 | FP64 | DELAYED, BERT | DP2 | FP16 | ZERO, MUON | MOE | DP2 | EP2 | FSDP,
    *product([MUON], [TP2, TP2 | NO_SP, DP2, DP2 | ZERO, DP2 | FSDP, PP2, TP2 | PP2 | TIED, CP2, DP4 | HSDP]),
    *product([MUON], [DEEPSEEK | TP2 | DP2 | EP4 | ZERO, MOE | DP2 | EP2, MOE | TP2 | DP2 | ETP2,
        MTP | PP2 | DP2 | ZERO]),
    *product([MUON], [DP2 | ZERO | FP64 | DELAYED | FP8_GATHER, DP2 | FSDP | CURRENT | FP8_GATHER, BF16 | DP2 | ZERO,
        GRAPHS]),
    *product([MUON], [LAYERS_4 | PP2 | ZB_V, T5 | TP2 | PP2, BERT | DP2 | ZERO, FP16 | DP2]),
    *product([QK_CLIP], [DP2 | FSDP, DP4 | HSDP, CP4 | WINDOW | DOCUMENTS, MTP | TP2 | PP2 | MUON, FULL, GRAPHS]),
    QK_CLIP | DEEPSEEK | PP2 | DP2 | FP64 | ZERO, QK_CLIP | QKV_BIAS | TP2 | CP2 | FP64,
    QK_CLIP | TP2 | FP64 | DELAYED, QK_CLIP | BF16 | DP2 | ZERO, QK_CLIP | DP2 | ZERO | DELAYED | FP8_GATHER,
    *product([BALANCED | TEXT | FP64], [PP2 | DP2, DP2 | FSDP, DP2 | MICRO2]),
    DP2 | CP2 | BEST_FIT, LAYERS_4 | PP4 | SAMPLES_4 | ANSWERS, BERT_PRE | TP2 | CP2 | FP64 | DELAYED,
    DROPOUT | DP2 | FSDP, DP2 | CP2 | TEXT, TP2 | DP2 | ANSWERS, MOE | TP2 | DP2 | FSDP,
    LAYERS_4 | MOE | PP2 | TP2 | EP2 | DUALPIPEV,
    CP2 | FP64 | ROWWISE, CP2 | FP64 | SEQ256 | MXFP8, MTP | DP2 | FSDP, BERT | DP2 | FSDP,
    T5_TIED | PP2 | DP2 | ZERO | DROPOUT,
    *product([DP2, DP2 | EP2, TP2, CP2 | EP2, CP2 | DP2 | EP4], [MOE, DEEPSEEK]),
    *product([TP2 | DP2 | EP2 | ZERO, PP2 | DP2 | EP2], [MOE, DEEPSEEK]),
    *product([PREFIX], [TP2, LAYERS_4 | PP2 | FULL, CP2 | DROPOUT, TP2 | CP2 | DELAYED | FP64, DP2 | FSDP, GRAPHS]),
    PREFIX | TEXT | DP2 | PP2, PREFIX | MOE | TP2 | EP2,
    TP2 | CP2, DEEPSEEK | TP2 | CP2 | EP4, MOE | DP4 | EP2 | FSDP, TP2 | PP2 | CURRENT, DP2 | PP2 | DELAYED,
    MOE | CP2 | DP2 | EP4 | FULL, LAYERS_4 | MOE | PP2 | DP2 | EP2 | ZB_H1 | SELECTIVE,
    MOE | DP2 | EP2 | ZERO | MASKED | DOCUMENTS,
    MOE | BF16 | DP2 | EP2, MOE | OFFLOAD | DP2 | EP2, MOE | BF16 | GRAPHS, DEEPSEEK | TP2 | CP2 | EP4 | FP64,
    MOE | DP2 | EP2 | BF16_REDUCE, LAYERS_4 | MOE | PP2 | DP4 | EP4 | INTERLEAVED, MOE | DP2 | EP2 | FP8_MOMENTS,
    MOE | DP4 | HSDP,
    LAYERS_4 | DEEPSEEK | PP2 | DP2 | EP2 | ZB_V, MOE | CP2 | EP2 | FP64 | CURRENT,
    MOE | DROPOUT | FP64 | DELAYED | TP2 | CP2 | EP2 | ETP2, DEEPSEEK | FP64 | CURRENT | TP2 | PP2,
    MOE | CP2 | ETP2 | FP64 | CURRENT,
    *product([MOE | FP64], [DELAYED | TP2, CURRENT | CP2, CURRENT | TP2 | CP2 | EP2, ROWWISE | CP2, BLOCKWISE | CP2]),
    *product([MOE | FP64 | CURRENT], [CP4 | EP2 | ALL_TO_ALL, TP2 | CP2 | FULL, TP2 | DP2 | EP2]),
    *product([MOE | ANSWERS], [DP2, TP2 | PP2 | ZB_H1 | LAYERS_4, CP2 | DP2 | EP2, DP2 | FSDP, BF16 | GRAPHS]),
    MOE | DP2 | EP2 | ALL_TO_ALL, MOE | FP64 | DELAYED | TP2 | EP2,
    DEEPSEEK | DP4 | EP2 | ETP2 | ZERO, DEEPSEEK | TP2 | ETP2, LAYERS_4 | MOE | PP2 | DP2 | ETP2 | ZB_V,
    MOE | DP4 | ETP2 | FSDP,
    *product([MOE, DEEPSEEK], [DP2 | EP2, TP2 | DP2 | EP2, TP2 | DP2 | EP4, DP4 | EP2 | FULL], [FSDP]),
    MOE | DP2 | FSDP,
    MOE | FP64 | DP4 | EP2 | HSDP, MOE | TP2 | DP4 | EP2 | HSDP, MOE | FP64 | DELAYED | TP2 | EP2 | FSDP,
    MOE | DP4 | EP2 | DELAYED | FSDP | FP8_GATHER,
    LAYERS_4 | MOE | PP2 | DP2 | EP2 | INTERLEAVED | FSDP, LAYERS_4 | MOE | PP2 | DP2 | EP2 | TIED | FSDP,
    MOE | BF16 | DP4 | EP2 | FSDP,
    MOE | BF16 | TP2 | DP2 | FSDP | GRAPHS, MOE | BF16 | DP2 | EP2 | FSDP | GRAPHS, MOE | DP4 | EP2 | ZERO,
    *product([ZERO_EXPERTS], [DP2 | EP2, TP2 | EP2 | FP64 | DELAYED, DP2 | EP2 | ALL_TO_ALL, DP2 | ETP2 | FULL]),
    *product([ZERO_EXPERTS | BF16 | GRAPHS], [NONE, DP2 | EP2]),
    *product([DROPPING | DP2], [NONE, EP2, EP2 | ALL_TO_ALL, ETP2]), *product([GLOBAL_BALANCE], [DP2, CP2 | EP2]),
    MOE | FP64 | DP2 | EP2 | FSDP | MASKED | DOCUMENTS, MOE | DP4 | EP2 | BF16_REDUCE | FSDP,
    MOE | DP4 | EP2 | FP8_MOMENTS | FSDP | LATE_REDUCE,
    *product([*LAYOUTS[:3], *LAYOUTS[4:], *UNEVEN], [NONE]), *product(LAYOUTS, [TIED, GPT2]),
    *product([TP2, PP2, LAYERS_4 | PP4 | SAMPLES_4, DP2, DP2 | FSDP, TP2 | DP2 | FSDP], [GPT2 | TIED]),
    TP2 | PP2 | GPT2 | TIED, UNEVEN[0] | GPT2 | TIED,
    TP2 | DP2 | FSDP, *product(CONTEXT, [GPT2 | TIED]), CP2, CP4, DP2 | CP2, TP2 | NO_SP | CP2, PP2 | CP2,
    CP4 | QK_NORM, CP4 | FULL, *product([TP2, CP4, DP2 | CP2, PP2 | CP2], [DOCUMENTS]),
    TP2 | CHUNKS | FP64, TP4 | CHUNKS | FP64, TP4 | CHUNKS | FP64 | DELAYED | SELECTIVE,
    *product([TP2 | NO_SP, TP2, PP2, CP2, CP4, PP2 | CP2], EXACT_FP8), DP2 | FP64 | CURRENT, TP2 | PP2 | TEXT,
    TP2 | PP2 | DELAYED, DP2 | PP2 | CURRENT, TP2 | CP2 | FP64 | CURRENT, TP2 | CP2 | FP64 | DELAYED,
    *product([*LAYOUTS[:5]], [CURRENT, DELAYED]),
    *product([DP2, TP2, TP2 | NO_SP, PP2, DP2 | CP2, DP2 | FSDP, MTP | TP2 | PP2 | DP2 | ZERO], [ANSWERS]),
    *product([LORA], [TP2 | NO_SP, TP2, CP2 | DP2, PP2 | ZB_H1, GPT2 | TIED | TP2 | PP2, DROPOUT | TP2 | CP2]),
    *product([LORA], [GRAPHS, OFFLOAD | TP2, LAYERS_4 | PP2 | ZB_V, CHUNKS | FP64 | DELAYED | TP2,
        CALIBRATED | REPORT]),
    *product([LORA], [DP2 | FSDP, TP2 | DP2 | FSDP | BF16, DP4 | HSDP | TIED, FP64 | DELAYED | TP2 | DP2 | FSDP,
        PP2 | DP2 | FSDP]),
    *product([LORA], [DEEPSEEK | TP2 | DP2 | EP4, DEEPSEEK | FP64 | DP2 | EP2 | FSDP, MOE | TP2 | DP2 | EP2 | ZERO]),
    *product([LORA_2], [DP4 | FSDP, MOE | DP4 | EP2 | FSDP, FEW_ROWS | DP4 | FSDP]),
    *product([FEW_ROWS], [DP4 | FSDP | GROUPS, DP4 | FSDP | FP8_GATHER | DELAYED, TP2 | DP2 | HSDP]),
    *product([LORA_Q_DOWN], [TP2, SELECTIVE | PP2, FULL | QKV_BIAS | TP2 | NO_SP | DP2, FP64 | CURRENT | TP2]),
    *product([DP2 | FSDP | FP8_GATHER, TP2 | DP2 | FSDP | FP8_GATHER], [CURRENT, DELAYED]),
    *product([DP4 | HSDP, TP2 | DP4 | HSDP, PP2 | DP4 | HSDP, CP2 | DP2 | HSDP, CP4 | HSDP], [NONE, TIED]),
    DP4 | SAMPLES_8 | HSDP | GPT2 | TIED, DP4 | HSDP | FP8_GATHER | CURRENT, TP2 | DP4 | HSDP | FP8_GATHER | DELAYED,
    PP2 | DP4 | SAMPLES_8 | HSDP | FP8_GATHER | CURRENT | TIED, DP4 | HSDP | FP16,
    *product([DP4 | ONE_SHARD], [TIED, DELAYED | FP8_GATHER, MOE]),
    *product([MTP], [PP2, TIED | PP2 | DP2 | ZERO, TP2 | NO_SP, CP2 | MASKED, CP2 | PP2 | DOCUMENTS, DP2 | BEST_FIT]),
    MTP | GPT2 | TIED | TP2 | PP2, DP2 | FSDP, DP2 | PP2 | DOCUMENTS, TP2 | CP2 | DOCUMENTS,
    MTP | TP2 | PP2 | DOCUMENTS,
    *product([DROPOUT], [GPT2 | TP2 | NO_SP, DEEPSEEK | TP2 | DP2 | EP4 | ZERO | DELAYED | FP8_GATHER,
        PARALLEL_BLOCK | TP2 | PP2]),
    *product([FP16], [TP2 | CP2 | MASKED, DP2 | FSDP | CURRENT, MOE | TP2 | DP2 | EP2, PP2 | ZB_H1 | TIED,
        MTP | DP2 | FULL]),
    *product([DROPOUT], [MTP | DEEPSEEK | CP2 | PP2 | OFFLOAD, BF16 | DP2 | ZERO,
        LAYERS_4 | MOE | PP2 | DP2 | EP2 | ZB_V | SELECTIVE]),
    *product([MTP | LAYERS_4], [PP2 | ZB_H1, PP2 | ZB_V, PP2 | DUALPIPEV | DP2 | ZERO, PP4 | SAMPLES_4,
        PP2 | INTERLEAVED]),
    *product([MTP], [TIED | DP2 | FSDP, PP2 | DP2 | FSDP, DP4 | HSDP, MOE | DP2 | FSDP,
        DP2 | FSDP | FP8_GATHER | CURRENT]),
    *product([MTP], [FULL, PP2 | FULL, OFFLOAD, PP2 | OFFLOAD, GRAPHS, BF16 | DP2, PP2 | DP2 | ZERO | LATE_GATHER]),
    MTP | DEEPSEEK | TP2 | CP2 | EP4, MTP | LAYERS_4 | DEEPSEEK | PP2 | DP2 | EP2 | ZB_V,
    MTP | TP2 | CHUNKS | FP64 | DELAYED | SELECTIVE,
    *product([BERT, BERT_PRE], [TP2, PP2, CP2, PP2 | DP2 | ZERO, TP2 | FP64 | CURRENT]),
    BERT | TP2 | CHUNKS | FP64 | DELAYED, BERT_PRE | TP2 | CHUNKS | FP64 | DELAYED, T5 | TP2 | CHUNKS | FP64 | CURRENT,
    *product([T5, T5_TIED], [TP2, TP2 | NO_SP, PP2, DP2 | FSDP, PP4 | SAMPLES_4, TP2 | PP2 | STAGES_1_3, PP2 | FULL]),
    *product([T5_TIED | LAYERS_4], [PP2 | INTERLEAVED, PP2 | ZB_V, PP2 | ZB_H1, PP2 | DP2 | DUALPIPEV]),
    *product([T5], [PP2 | ZB_H1 | CURRENT, PP2 | DP2 | FSDP, SELECTIVE, GRAPHS, BF16 | DP2]),
    T5 | DP2 | FSDP | FP8_GATHER | DELAYED, T5 | PP2 | DP2 | ZERO | FP8_GATHER | CURRENT,
    *product([BERT], [TP2 | NO_SP, TP2 | CP2 | DP2, PP2 | LAYERS_4 | ZB_V, LAYERS_4 | PP4 | SAMPLES_4, GRAPHS]),
    *product([BERT], [DP2 | FSDP | FP8_GATHER | DELAYED, FULL, SELECTIVE, PP2 | ZB_H1 | OFFLOAD, BF16 | DP2]),
    MTP | DEEPSEEK | TP2 | DP2 | EP4 | ZERO | DELAYED | FP8_GATHER, MTP | TP2 | CP2 | FP64 | DELAYED,
    MTP | DP2 | ZERO | FP8_GATHER | DELAYED,
]  # fmt: skip


@pytest.mark.parametrize("preset", slow_but(dict.fromkeys(QUICK_CASES + SLOW_CASES), *QUICK_CASES))
def test_the_loss_is_that_of_one_rank(runs: Runs, preset: Preset) -> None:
    assert_close_to_one_rank(runs, preset)


@pytest.mark.slow
def test_multi_token_prediction_without_weight_changes_nothing(runs: Runs) -> None:
    """It only has a loss of its own, at first that of a guess."""
    expected, found = runs.of(NO_CLIP), runs.of(NO_CLIP | MTP, model={"mtp_loss_scaling_factor": 0.0})
    assert {name: found.state[name] for name in expected.state} == expected.state
    own_losses = [ours - loss for (ours, _), (loss, _) in zip(found.curve, expected.curve)]
    assert own_losses[0] == pytest.approx(math.log(VOCABULARY), rel=0.02)


def _reported(config: Config) -> list[float | None]:
    """Return the losses of an evaluation and of a first step."""
    trainer, parallel = start(config)
    evaluated = trainer.evaluate(batches(EVALUATED, trainer.config, parallel))
    trained, _ = trainer.train_step(0, batches(0, trainer.config, parallel))
    assert (trained.z_loss is None) == (evaluated.z_loss is None) == (config.training.z_loss == 0)
    return [x for loss in (evaluated, trained) for x in (loss.mean, loss.auxiliary)]


@pytest.mark.parametrize("preset", [MTP | TP2, BERT | PP2, T5, MASKED | CP2])
def test_reported_losses_are_nats_per_token_without_the_z_loss(world2: World, preset: Preset) -> None:
    expected = world2.run(_reported, config_of(preset), ranks=preset.ranks)
    assert world2.run(_reported, config_of(preset | Z_LOSS), ranks=preset.ranks) == expected


def _gathered(config: Config) -> list[tuple[bool, int | None]]:
    """Return of each micro-batch whether a document is whole on a rank, and the gathered tokens of a rank."""
    trainer, parallel = start(config)
    own = trainer.own_tokens(batches(0, trainer.config, parallel))
    ranks = parallel.context.size
    return [(x.chunks is not None and bool(x.chunks[..., 2 * ranks :].any()), x.gathered) for x in own]


def test_documents_are_placed_on_context_ranks(world2: World) -> None:
    first, second = world2.run(_gathered, config_of(DOCUMENTS | CP2), ranks=2)
    assert first == second
    assert any(whole for whole, _ in first)
    recurrent = world2.run(_gathered, config_of(HYBRID | DOCUMENTS | CP2), ranks=2)[0]
    assert {*recurrent} == {(False, None)}  # samples are cut as a whole


# --- options, alone and in pairs -------------------------------------------------------------------------------------

OPTIONS: list[dict[str, Preset]] = [  # those of one group exclude each other
    {
        "1f1b": PP2, "interleaved": PP2 | INTERLEAVED, "zb-h1": PP2 | ZB_H1, "zb-v": PP2 | ZB_V,
        "dualpipev": PP2 | DUALPIPEV,
    },
    {"data": DP2},
    {"late-reduce": DP2 | LATE_REDUCE},
    {"zero": DP2 | ZERO, "zero-late": DP2 | ZERO | LATE_GATHER, "hsdp": DP4 | HSDP},
    {"bf16-reduce": DP2 | BF16_REDUCE},
    {"bf16-moments": BF16_MOMENTS, "fp8-moments": FP8_MOMENTS},
    {"remainders": BF16 | REMAINDERS},
    {"offload-state": OFFLOAD_STATE},
    {"tensor": TP2 | NO_SP, "tensor-sequence": TP2},
    {"tensor-overlap": TP2 | CHUNKS},
    {"context": CP2},
    {"full": FULL, "selective": SELECTIVE},
    {"offload": OFFLOAD},
    {"graphs": GRAPHS},
    {"fp8-gather": DP2 | ZERO | FP64 | CURRENT | FP8_GATHER},
    {"delayed": FP64 | DELAYED, "current": FP64 | CURRENT, "blockwise": FP64 | BLOCKWISE},
]  # fmt: skip
OPTION = {name: preset for group in OPTIONS for name, preset in group.items()}
PAIRS = [pair for one, other in itertools.combinations(OPTIONS, 2) for pair in itertools.product(one, other)]
REFUSED = {
    **{
        ("remainders", name): "it is for bf16 weights, and training.precision is fp64"
        for name in ("delayed", "current", "blockwise", "fp8-gather")
    },
    **{("hsdp", name): "it delays weight gradients" for name in ("zb-h1", "zb-v", "dualpipev")},
    ("hsdp", "remainders"): "parallel.fsdp stores fp32 masters only",
    ("tensor", "tensor-overlap"): "parallel.sequence_parallel is false, so every rank has all tokens",
    ("graphs", "offload"): "parallel.offload copies activations to host memory, which a graph cannot allocate",
    ("blockwise", "fp8-gather"): "fp8.recipe blockwise has finer scales for weights than one per tensor",
}
REASONS = {frozenset(pair): reason for pair, reason in REFUSED.items()}
RUN = [pair for pair in PAIRS if frozenset(pair) not in REASONS]
QUICK_PAIRS = [
    ("1f1b", "offload"),
    ("data", "bf16-reduce"),
]


def preset_of(*names: str) -> Preset:
    """The preset of these options; a recipe's comes after what another option needs where nothing else is said."""
    parts = [*dict.fromkeys(part for name in names for part in OPTION[name].parts)]
    chunks = {INTERLEAVED, ZB_V, DUALPIPEV} & {*parts}
    if HSDP in parts:  # what needs zero needs one of the two; several micro-batches
        parts = [part for part in parts if part != ZERO] + [SAMPLES_8]
    return joined([LAYERS_4 if chunks else NONE, MASKED, *parts])


QUICK_OPTIONS = ["hsdp", "fp8-moments", "delayed"]


@pytest.mark.parametrize("name", slow_but(OPTION, *QUICK_OPTIONS))
def test_an_option_alone(runs: Runs, name: str) -> None:
    assert_close_to_one_rank(runs, preset_of(name))


@pytest.mark.parametrize(("one", "other"), slow_but(RUN, *QUICK_PAIRS))
def test_two_options_together(runs: Runs, one: str, other: str) -> None:
    assert_close_to_one_rank(runs, preset_of(one, other), steps=2 if (one, other) in QUICK_PAIRS else 8)


def test_what_cannot_work_is_refused_before_any_process_group() -> None:
    """With its own reason each, wherever the run is started; all others are accepted."""
    assert not dist.is_initialized()
    assert max(preset_of(*pair).ranks for pair in RUN) == 8
    for pair in PAIRS:
        preset = preset_of(*pair)
        config, ranks = config_of(preset, device="auto"), preset.ranks
        if frozenset(pair) not in REASONS:
            check_config(config, ranks)
            continue
        with pytest.raises(ConfigError) as error:
            check_config(config, ranks)
        assert REASONS[frozenset(pair)] in str(error.value), pair
        assert "try " in str(error.value), pair


def test_graphs_on_a_cpu_are_refused() -> None:
    with pytest.raises(ConfigError, match="device is cpu, and CUDA graphs need a GPU"):
        check_layout(config_of(GRAPHS), 1)


# --- against the same run without an option --------------------------------------------------------------------------

BITS: dict[Preset, list[Preset]] = {
    # Under two data-parallel ranks every sum has two terms.
    ZERO: [DP2 | MASKED],
    LATE_REDUCE: [DP2 | ZERO],
    LATE_GATHER: [DP2 | ZERO],
    # FSDP reduces gradients micro-batch by micro-batch: with one there is only one order.
    FSDP: [DP2 | SAMPLES_2 | CURRENT | TIED],
    FP8_GATHER: [
        DP2 | SAMPLES_2 | CURRENT | TIED | FSDP, ZERO | DP2 | CURRENT | LATE_GATHER | LATE_REDUCE,
        LAYERS_1 | FSDP | MOE_6 | DP4 | EP2 | DELAYED,
    ],
    NO_TRANSPOSES: [MOE | DP2 | EP2 | DELAYED | FULL],
    ZB_H1: [PP2 | CLIP],
    FULL: [PP2 | DROPOUT],
    GRAPHS: [FP16 | DROPOUT],
}  # fmt: skip
# Under FSDP a rank shares its experts with no other of its replica, and holds them whole.
WHOLE_EXPERTS = [FSDP | MOE_6 | DP2 | EP2 | DELAYED, HSDP | MOE_6 | DP4 | EP2 | CURRENT]
SLOW_BITS: dict[Preset, list[Preset]] = {
    ZERO | LATE_REDUCE: [MOE | TP2 | DP2 | EP2],
    ZERO: [
        PP2 | DP2 | ZB_H1, TP2 | DP2 | DELAYED, DP2 | BF16, DP2,
        DP2 | TIED, DP2 | GPT2, DP2 | DELAYED, DP2 | CURRENT, DP2 | BF16_REDUCE | BF16_MOMENTS, TP2 | DP2,
        TP2 | NO_SP | DP2 | TIED, CP2, LAYERS_4 | PP2 | DP2 | ZB_V | TIED, PP2 | DP2, PP2 | DP2 | TIED,
        PP2 | DP2 | TIED | LARGE_BUCKETS, PP2 | DP2 | CURRENT, LAYERS_4 | PP2 | DP2 | ZB_V | MTP,
    ],
    # Two replicas on two ranks: each has all weights and sums its micro-batches, of which a tied weight has two terms.
    HSDP: [DP2 | more for more in (NONE, SAMPLES_2 | TIED, SAMPLES_8 | DELAYED, BF16 | CURRENT, MASKED)],
    LATE_REDUCE: [
        LAYERS_4 | PP2 | DP2 | ZB_V, DP4 | SAMPLES_8 | HSDP, LAYERS_4 | PP2 | DP2 | INTERLEAVED,
        DP4 | SAMPLES_8 | HSDP | BF16_REDUCE,
        PP2 | DP4 | SAMPLES_8 | HSDP | TIED, TP2 | DP4 | HSDP | GPT2 | TIED, MOE | DP4 | EP2 | SAMPLES_8 | FSDP,
        MOE | TP2 | DP4 | EP2 | HSDP,
    ],
    LATE_GATHER: [DP4 | HSDP | DELAYED | FP8_GATHER, HSDP | MOE_6 | DP4 | EP2],
    DUALPIPEV: [LAYERS_4 | PP2 | CLIP | ZB_V],
    NO_TRANSPOSES: [
        TP2 | BF16 | CURRENT | GRAPHS, TP2 | DP2 | ZERO | DELAYED | FP8_GATHER, LAYERS_4 | PP2 | ZB_V | DELAYED,
        CALIBRATED, LORA | DELAYED, CURRENT | FPROP_BF16, CURRENT | DGRAD_BF16, CUSTOM, HYBRID | DELAYED | REPORT,
    ],
    FSDP: [DP2 | SAMPLES_2 | more for more in (
        BF16 | DELAYED, NONE, DELAYED, BF16 | BF16_REDUCE, BLOCKWISE, ROWWISE, CALIBRATED, CURRENT | SELECTIVE,
        CURRENT | FPROP_BF16, CURRENT | DGRAD_BF16, CURRENT | WGRAD_BF16, MOE | EP2, MOE | EP2 | BF16 | DELAYED,
    )],
    FP8_GATHER: [
        FSDP | DP2 | BF16 | DELAYED, ZERO | DP2 | CUSTOM,
        LAYERS_4 | ZERO | PP2 | DP2 | ZB_V | CURRENT, ZERO | DP2 | DELAYED | SOME_LAYERS,
        FSDP | DP2 | DELAYED | TIED, DP4 | HSDP | DELAYED, ZERO | TP2 | NO_SP | DP2 | DELAYED,
        FSDP | DP3 | CURRENT, ZERO | CURRENT, ZERO | DP2 | CURRENT | TIED, ZERO | DP2 | DELAYED | GPT2,
        ZERO | DP2 | BF16 | DELAYED,
        ZERO | TP2 | DP2 | CURRENT, FSDP | CURRENT, FSDP | DP2 | CURRENT, FSDP | DP2 | STATIC,
        FSDP | DP2 | DELAYED,
        FSDP | DP2 | CURRENT | SOME_LAYERS, FSDP | PP2 | DP2 | DELAYED, FSDP | DP2 | DELAYED | FULL,
        TP2 | DP4 | HSDP | CURRENT | TIED,
        PP2 | DP4 | SAMPLES_8 | HSDP | DELAYED, ZERO | DP2 | DELAYED_2, ZERO | DP2 | STATIC,
        ZERO | DP2 | CURRENT | WGRAD_BF16 | POWER_OF_TWO,
        ZERO | DP2 | BF16 | CURRENT | BF16_MOMENTS, ZERO | DP2 | DELAYED | FULL, ZERO | CP2 | CURRENT,
        ZERO | PP2 | DP2 | DELAYED | TIED,
        FSDP | MOE | DP4 | EP2 | CURRENT, FSDP | TP2 | DP2 | CURRENT,
        *product([FSDP | MOE_6 | DP4 | EP2], [CURRENT, DELAYED | BF16, DELAYED | SELECTIVE]),
        *product([ZERO | MOE_6 | TP2 | DP2 | EP2], [CURRENT, DELAYED | BF16, DELAYED | SELECTIVE]),
        *product([MOE_6 | DP2], [ZERO, FSDP], [DELAYED, CURRENT | BF16, STATIC, DELAYED | FULL]),
        *product([MOE_6 | DP2 | CURRENT | SOME_EXPERTS], [ZERO, FSDP]), *WHOLE_EXPERTS,
        MOE_6 | DP4 | HSDP | DELAYED,
        *product([MOE | TP2 | DP2 | ETP2], [ZERO, FSDP], [CURRENT, DELAYED]), FSDP | GPT_OSS | DP4 | EP2 | DELAYED,
        FSDP | MOE_6 | PP2 | DP2 | DELAYED,
    ],
    ZB_H1: [
        PP2 | CALIBRATED, PP2 | DELAYED, PP2 | NVFP4, PP2 | DELAYED | WGRAD_BF16, PP2 | DELAYED | DGRAD_BF16,
    ],
    ZB_V | FULL: [LAYERS_4 | TP2 | PP2 | SAMPLES_3 | NO_CLIP | more for more in (DELAYED, WIDE | SEQ256 | BLOCKWISE)],
    **{mode: [TP2, PP2, TP2 | DELAYED, TP2 | DELAYED | DROPOUT, PP2 | DELAYED, MTP | PP2 | DELAYED,
              TP2 | CURRENT, TP2 | BLOCKWISE, PP2 | CURRENT, PP2 | BLOCKWISE]
       for mode in (FULL, NORMS, ACTIVATION, OFFLOAD, OFFLOAD_1 | SELECTIVE)},
}  # fmt: skip
QUICK_MODES = [PP2 | ZB_H1 | DELAYED]
SLOW_MODES = [
    TP2 | NO_SP | DELAYED,
    PP2 | DELAYED | REPORT, DELAYED | QK_NORM,
    TP2 | WIDE | SEQ256 | BLOCKWISE, TP2 | NVFP4, CP2 | CURRENT, TP2 | GPT2 | DELAYED, TP2 | DELAYED | DROPOUT,
    MOE | TP2 | EP2,
    TP2 | NO_SP, TP2 | ROWWISE, CP2, PP2 | ZB_H1, TP2 | GPT2,
    TP2 | ROWWISE | WGRAD_BF16, TP2 | CALIBRATED, PP2 | NVFP4, CP2 | DELAYED,
    LAYERS_4 | PP2 | INTERLEAVED | CURRENT, TP2 | GELU | CURRENT, TP2 | PARALLEL_BLOCK | DELAYED,
]  # fmt: skip
ONE_RANK_MODES = [FULL, FULL_FIRST, NORMS, ACTIVATION, ATTENTION, SELECTIVE, OFFLOAD, OFFLOAD | FULL]
QUICK_BITS = [(option, preset) for option, cases in BITS.items() for preset in cases]
QUICK_BITS += itertools.product([SELECTIVE], QUICK_MODES)
MORE_BITS = [(option, preset) for option, cases in SLOW_BITS.items() for preset in cases]
MORE_BITS += itertools.product([SELECTIVE, OFFLOAD_1 | SELECTIVE], QUICK_MODES + SLOW_MODES)
MORE_BITS += itertools.product([*ONE_RANK_MODES, OFFLOAD_1 | SELECTIVE], [NONE, DELAYED, CURRENT, BLOCKWISE])
OTHER_PLACEMENT = {INTERLEAVED, ZB_V, DUALPIPEV, ZB_V | FULL}
"""Options under which a rank has other layers, so that the norm is summed in another order."""
NOT_GATHERED_IN_FP8 = {CUSTOM: 2, SOME_LAYERS: 5, SOME_EXPERTS: 1}
"""Of 8 linear layers."""


@pytest.mark.parametrize(("option", "preset"), slow_but(dict.fromkeys(QUICK_BITS + MORE_BITS), *QUICK_BITS))
def test_an_option_changes_no_bit(runs: Runs, option: Preset, preset: Preset) -> None:
    expected, found = runs.of(preset, 1), runs.of(preset | option, 1)
    assert len(set(losses(found.curve))) == len(found.curve)
    if option in OTHER_PLACEMENT and not OTHER_PLACEMENT & {*preset.parts}:
        assert losses(found.curve) == losses(expected.curve)
    else:
        assert found.curve == expected.curve
    assert found.state == expected.state
    assert found.records == expected.records
    config, ranks = config_of(preset), preset.ranks
    if CLIP in preset:
        assert min(norm for _, norm in expected.curve if norm) > config.optimizer.clip_grad_norm
    if option == ZERO:
        shards = ranks // (config.parallel.tensor * config.parallel.pipeline)
        for key in found.elements[0].keys() & {"exp_avg", "exp_avg_sq", "master"}:
            assert all(rank[key] == rank["weights"] for rank in expected.elements)
            assert all(rank[key] <= rank["gradients"] // shards for rank in found.elements)
            total = sum(rank["weights"] for rank in expected.elements)
            assert sum(rank[key] for rank in found.elements) == total // shards
    if option == FP8_GATHER:
        layers = 4 * config.model.num_layers // config.parallel.pipeline
        layers -= sum(NOT_GATHERED_IN_FP8.get(part, 0) for part in preset.parts)
        layers -= 4 * (preset in WHOLE_EXPERTS)
        assert all(rank["released"] == layers for rank in found.elements)
        if config.parallel.zero:  # nothing of the values is left
            assert all(rank["released storage"] == layers for rank in found.elements)


def losses(curve: Curve) -> list[float]:
    return [loss for loss, _ in curve]


SUMS = {
    ZERO: [DP4, CP2 | DP2, DP2 | FP64],  # in fp64 the norm shows in which order its squares were added
    FSDP: [
        DP2, DP2 | FULL, PP2 | DP2 | TIED, DP3, TP2 | DP2,
        TIED, DP2 | TIED, DP2 | GPT2, DP2 | SAMPLES_8, TP2 | NO_SP | DP2 | TIED, CP2 | DP2, PP2 | DP2,
        LAYERS_4 | PP2 | DP2 | INTERLEAVED, DP2 | OFFLOAD, MOE | DP4 | EP2, DEEPSEEK | TP2 | DP2 | EP4, MOE | TP2 | DP2,
    ],
    HSDP: [
        DP4, DP4 | SAMPLES_8 | TIED, DP4 | FULL, TP2 | DP4, PP2 | DP4 | TIED, CP2 | DP2 | GPT2,
        LAYERS_4 | PP2 | DP4 | SAMPLES_8 | INTERLEAVED, MOE | DP4 | EP2, MOE | TP2 | DP4 | EP2,
    ],
}  # fmt: skip
SUMS_CASES = [(option, preset) for option, cases in SUMS.items() for preset in cases]


@pytest.mark.parametrize(("option", "preset"), slow_but(SUMS_CASES, SUMS_CASES[4]))
def test_an_option_changes_only_the_order_of_sums(runs: Runs, option: Preset, preset: Preset) -> None:
    expected, found = runs.of(preset), runs.of(preset | option)
    for a, b in zip(found.curve, expected.curve, strict=True):
        assert a == pytest.approx(b, rel=1e-14 if FP64 in preset else 1e-6)
    if option == ZERO:
        for whole, shard in zip(expected.elements, found.elements):
            shards = preset.ranks
            assert shard["exp_avg"] <= shard["gradients"] // shards < whole["exp_avg"] * 1.08 / shards
        assert sum(shard["exp_avg"] for shard in found.elements) == expected.elements[0]["exp_avg"]


# --- pipeline schedules ----------------------------------------------------------------------------------------------

SCHEDULES = [NONE, ZB_H1, INTERLEAVED, ZB_V, DUALPIPEV]
PIPELINES = [
    LAYERS_4 | QKV_BIAS | NO_CLIP | DROPOUT | PP2,
    LAYERS_8 | QKV_BIAS | NO_CLIP | PP4 | SAMPLES_4 | DELAYED,
    LAYERS_4 | QKV_BIAS | NO_CLIP | PP2 | SAMPLES_1 | TIED | DELAYED,
    LAYERS_8 | QKV_BIAS | NO_CLIP | PP4 | SAMPLES_3 | TIED,
    LAYERS_8 | QKV_BIAS | NO_CLIP | PP4 | SAMPLES_8 | DELAYED,
]


@pytest.mark.parametrize("preset", slow_but(PIPELINES, PIPELINES[0]))
def test_schedules_and_one_rank_train_the_same(runs: Runs, preset: Preset) -> None:
    """A micro-batch is computed alike under every schedule, and gradients are summed in the order of the micro-batches.
    So no bit depends on the schedule, nor on the number of stages, as long as no sum over the whole model enters
    (clipping) and the embedding is not shared between two layers of one stage."""
    steps = 0 if preset == PIPELINES[0] else STEPS  # after those that every run has
    one_rank, plain = runs.one_rank(preset, steps), runs.of(preset, steps)
    for schedule in SCHEDULES:
        found = runs.of(preset | schedule, steps)
        assert losses(found.curve) == losses(plain.curve)
        assert found.state == plain.state
    assert plain.curve[0] == (one_rank.curve[0][0], pytest.approx(one_rank.curve[0][1], rel=1e-5))
    if TIED not in preset:
        assert losses(plain.curve) == losses(one_rank.curve)
        assert plain.state == one_rank.state
    loose = 2e-2 if DELAYED in preset else 1e-5
    assert [norm for _, norm in plain.curve] == pytest.approx([norm for _, norm in one_rank.curve], rel=loose)


@pytest.mark.slow
def test_stages_by_hand_and_one_rank_train_the_same(runs: Runs) -> None:
    preset = LAYERS_8 | QKV_BIAS | NO_CLIP | PP2 | ZB_V | STAGES_1_3_3_1
    found, expected = runs.of(preset), runs.one_rank(preset)
    assert losses(found.curve) == losses(expected.curve)
    assert found.state == expected.state
