"""One seed, any layout, one model: however a run is executed, its losses, gradient norms and state are the plain run's.

A run is given by words (`runs.WORDS`), and compared in one of two ways.

*With one rank* (`QUICK_CASES`, `OPTIONS`): the same model, batches and recipe, everything about its execution at its
default. Sums are made in another order, so the comparison is as sharp as the arithmetic allows (`tolerances`):

    fp32             losses and gradient norms to 1e-5, relative
    FP8, fp64 sums   to 1e-8 and 1e-6, so that a wrong amax group cannot hide. Ranks of data and context parallelism
                     round their gradients to fp32 before these are added up, and shards cut through blocks of 128,
                     whose scales, powers of two, then differ and with them subnormal values; from the third step on
                     that may move a value over a rounding boundary of FP8: losses are held to 2e-3, norms to 2e-2
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
import torch.distributed as dist

from megafp8.config import ConfigError, check_layout
from tests.marks import slow_but
from tests.training.runs import VOCABULARY, Curve, Runs, check_config, config_of, ranks_of

# --- against one rank ------------------------------------------------------------------------------------------------

FP8 = {"delayed", "current", "rowwise", "blockwise", "mxfp8", "nvfp4", "calibrated", "static", "custom"}
ROUNDED_SUMS = {"dp2", "dp3", "dp4", "cp2", "cp4"}
LOOSE = (2e-3, 2e-2)


def tolerances(words: str) -> tuple[tuple[float, float], tuple[int, int]]:
    """Relative tolerance of losses and norms, and for how many steps each is that sharp; after that it is `LOOSE`."""
    names = set(words.split())
    sharp = (math.inf, math.inf)
    if names & {"bf16-moments", "fp8-moments"} or (names & FP8 and names & ROUNDED_SUMS):
        sharp = (2, 2)
    if "blockwise" in names:
        sharp = (2, 1)
    if "bf16-reduce" in names:
        sharp = (1, 0)
    if names & {"bf16", "fp16"} or (names & FP8 and "fp64" not in names):
        sharp = (0, 0)
    return (1e-8, 1e-6) if "fp64" in names else (1e-5, 1e-5), sharp


def assert_close_to_one_rank(runs: Runs, words: str, steps: int = 2) -> None:
    expected, found = (of(words, steps).curve for of in (runs.one_rank, runs.of))
    if "text" not in words:
        assert expected[-1][0] < expected[0][0], "the reference does not learn"
    exact, sharp = tolerances(words)
    for step, pair in enumerate(zip(found, expected, strict=True)):
        for i, (a, b) in enumerate(zip(*pair)):
            what = f"{('loss', 'norm')[i]} of step {step}"
            assert a == pytest.approx(b, rel=exact[i] if step < sharp[i] else LOOSE[i]), what


def product(*words: Sequence[str]) -> list[str]:
    """All combinations of one from each."""
    return [" ".join(filter(None, chosen)) for chosen in itertools.product(*words)]


LAYOUTS = ["tp2 no-sp", "tp2", "pp2", "4-layers pp4 4-samples", "dp2", "tp2 pp2", "dp2 pp2"]
UNEVEN = ["4-layers pp2 1+3", "4-layers tp2 pp2 3+1"]
CONTEXT = ["cp2", "cp4", "dp2 cp2", "tp2 no-sp cp2", "tp2 cp2", "pp2 cp2"]
EXACT_FP8 = ["fp64 current", "fp64 delayed"]
QUICK_CASES = [
    "4-layers pp4 4-samples", *product(["tp2 no-sp", "dp2 pp2", UNEVEN[1]], ["gpt2 tied"]),  # fp32
    "cp4 window",
    *product(["dropout tp2 cp2", "mtp dropout tp2 pp2"], ["documents"]), "dp2 masked", "prefix 4-layers tp2 pp2 masked",
    "lora tp2 dp2 zero answers", "lora fp64 delayed tp2 pp2",
    "moe dropout fp64 current tp2 cp2 etp2", "deepseek tp2 dp2 ep4 zero delayed fp8-gather",  # experts
    "tp2 chunks fp64 delayed selective", "tp2 pp2 fp64 current",  # FP8 with fp64 sums
    "tp2 cp2 fp64 calibrated smooth", "cp2 fp64 wide seq256 blockwise",
    "dp4 hsdp fp8-gather delayed",  # FP8 with fp32 sums
    "dp2 pp2 fp16 zero delayed",
    "hybrid tp2 pp2 documents",
    "bert tp2 pp2 4-samples dropout", "t5 pp2 fp16 dropout",  # encoders
    "muon groups tp2 pp2 dp2 zero",
]  # fmt: skip
SLOW_CASES = [
    *product(["hybrid"], ["tp2", "tp2 no-sp", "pp2 zb-h1", "4-layers pp2 zb-v", "dp2 zero", "dp2 fsdp", "full"]),
    *product(["hybrid"], ["offload", "tp2 selective", "tp2 fp64 delayed", "fp64 current dp2", "graphs", "moe dp2 ep2"]),
    "hybrid muon dp2 zero",
    "dropout micro2 dp2 pp2 documents", "pp2 cp2 masked", "tp2 pp2 fp64 delayed", "dp2 fp64 delayed",
    "t5 tp2 fp64 delayed", "bert dp2 fp16 zero", "muon moe dp2 ep2 fsdp",
    *product(["muon"], ["tp2", "tp2 no-sp", "dp2", "dp2 zero", "dp2 fsdp", "pp2", "tp2 pp2 tied", "cp2", "dp4 hsdp"]),
    *product(["muon"], ["deepseek tp2 dp2 ep4 zero", "moe dp2 ep2", "moe tp2 dp2 etp2", "mtp pp2 dp2 zero"]),
    *product(["muon"], ["dp2 zero fp64 delayed fp8-gather", "dp2 fsdp current fp8-gather", "bf16 dp2 zero", "graphs"]),
    *product(["muon"], ["4-layers pp2 zb-v", "t5 tp2 pp2", "bert dp2 zero", "fp16 dp2"]),
    "dp2 cp2 best-fit", "4-layers pp4 4-samples answers", "bert-pre tp2 cp2 fp64 delayed",
    "dropout dp2 fsdp", "dp2 cp2 text", "tp2 dp2 answers", "moe tp2 dp2 fsdp", "4-layers moe pp2 tp2 ep2 dualpipev",
    "cp2 fp64 rowwise", "cp2 fp64 seq256 mxfp8", "mtp dp2 fsdp", "bert dp2 fsdp", "t5-tied pp2 dp2 zero dropout",
    *product(["dp2", "dp2 ep2", "tp2", "cp2 ep2", "cp2 dp2 ep4"], ["moe", "deepseek"]),
    *product(["tp2 dp2 ep2 zero", "pp2 dp2 ep2"], ["moe", "deepseek"]),
    *product(["prefix"], ["tp2", "4-layers pp2 full", "cp2 dropout", "tp2 cp2 delayed fp64", "dp2 fsdp", "graphs"]),
    "prefix text dp2 pp2", "prefix moe tp2 ep2",
    "tp2 cp2", "deepseek tp2 cp2 ep4", "moe dp4 ep2 fsdp", "tp2 pp2 current", "dp2 pp2 delayed",
    "moe cp2 dp2 ep4 full", "4-layers moe pp2 dp2 ep2 zb-h1 selective", "moe dp2 ep2 zero masked documents",
    "moe bf16 dp2 ep2", "moe offload dp2 ep2", "moe bf16 graphs", "deepseek tp2 cp2 ep4 fp64",
    "moe dp2 ep2 bf16-reduce", "4-layers moe pp2 dp4 ep4 interleaved", "moe dp2 ep2 fp8-moments", "moe dp4 hsdp",
    "4-layers deepseek pp2 dp2 ep2 zb-v", "moe cp2 ep2 fp64 current",
    "moe dropout fp64 delayed tp2 cp2 ep2 etp2", "deepseek fp64 current tp2 pp2", "moe cp2 etp2 fp64 current",
    *product(["moe fp64"], ["delayed tp2", "current cp2", "current tp2 cp2 ep2", "rowwise cp2", "blockwise cp2"]),
    *product(["moe fp64 current"], ["cp4 ep2 all-to-all", "tp2 cp2 full", "tp2 dp2 ep2"]),
    *product(["moe answers"], ["dp2", "tp2 pp2 zb-h1 4-layers", "cp2 dp2 ep2", "dp2 fsdp", "bf16 graphs"]),
    "moe dp2 ep2 all-to-all", "moe fp64 delayed tp2 ep2",
    "deepseek dp4 ep2 etp2 zero", "deepseek tp2 etp2", "4-layers moe pp2 dp2 etp2 zb-v", "moe dp4 etp2 fsdp",
    *product(["moe", "deepseek"], ["dp2 ep2", "tp2 dp2 ep2", "tp2 dp2 ep4", "dp4 ep2 full"], ["fsdp"]), "moe dp2 fsdp",
    "moe dp4 ep2 hsdp", "moe tp2 dp4 ep2 hsdp", "moe fp64 delayed tp2 ep2 fsdp", "moe dp4 ep2 delayed fsdp fp8-gather",
    "4-layers moe pp2 dp2 ep2 interleaved fsdp", "4-layers moe pp2 dp2 ep2 tied fsdp", "moe bf16 dp4 ep2 fsdp",
    "moe bf16 tp2 dp2 fsdp graphs", "moe dp4 ep2 zero",
    *product(["dropping dp2"], ["", "ep2", "ep2 all-to-all", "etp2"]), *product(["global-balance"], ["dp2", "cp2 ep2"]),
    "moe dp2 ep2 fsdp masked documents", "moe dp4 ep2 bf16-reduce fsdp", "moe dp4 ep2 fp8-moments fsdp late-reduce",
    *product([*LAYOUTS[:3], *LAYOUTS[4:], *UNEVEN], [""]), *product(LAYOUTS, ["tied", "gpt2"]),
    *product(["tp2", "pp2", "4-layers pp4 4-samples", "dp2", "dp2 fsdp", "tp2 dp2 fsdp"], ["gpt2 tied"]),
    "tp2 pp2 gpt2 tied", f"{UNEVEN[0]} gpt2 tied",
    "tp2 dp2 fsdp", *product(CONTEXT, ["gpt2 tied"]), "cp2", "cp4", "dp2 cp2", "tp2 no-sp cp2", "pp2 cp2",
    "cp4 qk-norm", "cp4 full", *product(["tp2", "cp4", "dp2 cp2", "pp2 cp2"], ["documents"]),
    "tp2 chunks fp64", "tp4 chunks fp64", "tp4 chunks fp64 delayed selective",
    *product(["tp2 no-sp", "tp2", "pp2", "cp2", "cp4", "pp2 cp2"], EXACT_FP8), "dp2 fp64 current", "tp2 pp2 text",
    "tp2 pp2 delayed", "dp2 pp2 current", "tp2 cp2 fp64 current", "tp2 cp2 fp64 delayed",
    *product([*LAYOUTS[:5]], ["current", "delayed"]),
    *product(["dp2", "tp2", "tp2 no-sp", "pp2", "dp2 cp2", "dp2 fsdp", "mtp tp2 pp2 dp2 zero"], ["answers"]),
    *product(["lora"], ["tp2 no-sp", "tp2", "cp2 dp2", "pp2 zb-h1", "gpt2 tied tp2 pp2", "dropout tp2 cp2"]),
    *product(["lora"], ["graphs", "offload tp2", "4-layers pp2 zb-v", "chunks fp64 delayed tp2", "calibrated report"]),
    *product(["lora"], ["dp2 fsdp", "tp2 dp2 fsdp bf16", "dp4 hsdp tied", "fp64 delayed tp2 dp2 fsdp", "pp2 dp2 fsdp"]),
    *product(["lora"], ["deepseek tp2 dp2 ep4", "deepseek fp64 dp2 ep2 fsdp", "moe tp2 dp2 ep2 zero"]),
    *product(["lora-2"], ["dp4 fsdp", "moe dp4 ep2 fsdp", "few-rows dp4 fsdp"]),
    *product(["few-rows"], ["dp4 fsdp groups", "dp4 fsdp fp8-gather delayed", "tp2 dp2 hsdp"]),
    *product(["lora-q-down"], ["tp2", "selective pp2", "full qkv-bias tp2 no-sp dp2", "fp64 current tp2"]),
    *product(["dp2 fsdp fp8-gather", "tp2 dp2 fsdp fp8-gather"], ["current", "delayed"]),
    *product(["dp4 hsdp", "tp2 dp4 hsdp", "pp2 dp4 hsdp", "cp2 dp2 hsdp", "cp4 hsdp"], ["", "tied"]),
    "dp4 8-samples hsdp gpt2 tied", "dp4 hsdp fp8-gather current", "tp2 dp4 hsdp fp8-gather delayed",
    "pp2 dp4 8-samples hsdp fp8-gather current tied",
    *product(["mtp"], ["pp2", "tied pp2 dp2 zero", "tp2 no-sp", "cp2 masked", "cp2 pp2 documents", "dp2 best-fit"]),
    "mtp gpt2 tied tp2 pp2", "dp2 fsdp", "dp2 pp2 documents", "tp2 cp2 documents", "mtp tp2 pp2 documents",
    *product(["dropout"], ["gpt2 tp2 no-sp", "deepseek tp2 dp2 ep4 zero delayed fp8-gather", "parallel-block tp2 pp2"]),
    *product(["fp16"], ["tp2 cp2 masked", "dp2 fsdp current", "moe tp2 dp2 ep2", "pp2 zb-h1 tied", "mtp dp2 full"]),
    *product(["dropout"], ["mtp deepseek cp2 pp2 offload", "bf16 dp2 zero", "4-layers moe pp2 dp2 ep2 zb-v selective"]),
    *product(["mtp 4-layers"], ["pp2 zb-h1", "pp2 zb-v", "pp2 dualpipev dp2 zero", "pp4 4-samples", "pp2 interleaved"]),
    *product(["mtp"], ["tied dp2 fsdp", "pp2 dp2 fsdp", "dp4 hsdp", "moe dp2 fsdp", "dp2 fsdp fp8-gather current"]),
    *product(["mtp"], ["full", "pp2 full", "offload", "pp2 offload", "graphs", "bf16 dp2", "pp2 dp2 zero late-gather"]),
    "mtp deepseek tp2 cp2 ep4", "mtp 4-layers deepseek pp2 dp2 ep2 zb-v", "mtp tp2 chunks fp64 delayed selective",
    *product(["bert", "bert-pre"], ["tp2", "pp2", "cp2", "pp2 dp2 zero", "tp2 fp64 current"]),
    "bert tp2 chunks fp64 delayed", "bert-pre tp2 chunks fp64 delayed", "t5 tp2 chunks fp64 current",
    *product(["t5", "t5-tied"], ["tp2", "tp2 no-sp", "pp2", "dp2 fsdp", "pp4 4-samples", "tp2 pp2 1+3", "pp2 full"]),
    *product(["t5-tied 4-layers"], ["pp2 interleaved", "pp2 zb-v", "pp2 zb-h1", "pp2 dp2 dualpipev"]),
    *product(["t5"], ["pp2 zb-h1 current", "pp2 dp2 fsdp", "selective", "graphs", "bf16 dp2"]),
    "t5 dp2 fsdp fp8-gather delayed", "t5 pp2 dp2 zero fp8-gather current",
    *product(["bert"], ["tp2 no-sp", "tp2 cp2 dp2", "pp2 4-layers zb-v", "4-layers pp4 4-samples", "graphs"]),
    *product(["bert"], ["dp2 fsdp fp8-gather delayed", "full", "selective", "pp2 zb-h1 offload", "bf16 dp2"]),
    "mtp deepseek tp2 dp2 ep4 zero delayed fp8-gather", "mtp tp2 cp2 fp64 delayed", "mtp dp2 zero fp8-gather delayed",
]  # fmt: skip


@pytest.mark.parametrize("words", slow_but(QUICK_CASES + SLOW_CASES, *QUICK_CASES))
def test_the_loss_is_that_of_one_rank(runs: Runs, words: str) -> None:
    assert_close_to_one_rank(runs, words)


def test_multi_token_prediction_without_weight_changes_nothing(runs: Runs) -> None:
    """It only has a loss of its own, at first that of a guess."""
    expected, found = runs.of("no-clip"), runs.of("no-clip mtp", model={"mtp_loss_scaling_factor": 0.0})
    assert {name: found.state[name] for name in expected.state} == expected.state
    own_losses = [ours - loss for (ours, _), (loss, _) in zip(found.curve, expected.curve)]
    assert own_losses[0] == pytest.approx(math.log(VOCABULARY), rel=0.02)


# --- options, alone and in pairs -------------------------------------------------------------------------------------

OPTIONS: list[dict[str, str]] = [  # those of one group exclude each other
    {
        "1f1b": "pp2", "interleaved": "pp2 interleaved", "zb-h1": "pp2 zb-h1", "zb-v": "pp2 zb-v",
        "dualpipev": "pp2 dualpipev",
    },
    {"data": "dp2"},
    {"late-reduce": "dp2 late-reduce"},
    {"zero": "dp2 zero", "zero-late": "dp2 zero late-gather", "hsdp": "dp4 hsdp"},
    {"bf16-reduce": "dp2 bf16-reduce"},
    {"bf16-moments": "bf16-moments", "fp8-moments": "fp8-moments"},
    {"remainders": "bf16 remainders"},
    {"tensor": "tp2 no-sp", "tensor-sequence": "tp2"},
    {"tensor-overlap": "tp2 chunks"},
    {"context": "cp2"},
    {"full": "full", "selective": "selective"},
    {"offload": "offload"},
    {"graphs": "graphs"},
    {"smooth": "fp64 delayed smooth"},
    {"fp8-gather": "dp2 zero fp64 current fp8-gather"},
    {"delayed": "fp64 delayed", "current": "fp64 current", "blockwise": "fp64 blockwise"},
]  # fmt: skip
OPTION = {name: words for group in OPTIONS for name, words in group.items()}
PAIRS = [pair for one, other in itertools.combinations(OPTIONS, 2) for pair in itertools.product(one, other)]
REFUSED = {
    **{
        ("remainders", name): "it is for bf16 weights, and training.precision is fp64"
        for name in ("delayed", "current", "blockwise", "smooth", "fp8-gather")
    },
    **{("hsdp", name): "it leaves weight gradients for later" for name in ("zb-h1", "zb-v", "dualpipev")},
    ("hsdp", "remainders"): "parallel.fsdp stores fp32 masters only",
    ("tensor", "tensor-overlap"): "parallel.sequence_parallel is false, so every rank has all tokens",
    ("graphs", "offload"): "parallel.offload copies activations to memory of the host, which a graph cannot allocate",
    ("blockwise", "smooth"): "fp8.recipe blockwise has finer scales for an MLP's input than one per tensor",
    ("blockwise", "fp8-gather"): "fp8.recipe blockwise has finer scales for weights than one per tensor",
}
REASONS = {frozenset(pair): reason for pair, reason in REFUSED.items()}
RUN = [pair for pair in PAIRS if frozenset(pair) not in REASONS]
QUICK_PAIRS = [
    ("1f1b", "offload"),
    ("dualpipev", "zero"),
    ("zero", "graphs"),
    ("data", "bf16-reduce"),
    ("zero", "current"),
    ("selective", "blockwise"),
    ("zero", "remainders"),
]


def words_of(*names: str) -> str:
    """The words of these options; a recipe's come after what another option needs where nothing else is said."""
    words = dict.fromkeys(word for name in names for word in OPTION[name].split())
    chunks = words.keys() & {"interleaved", "zb-v", "dualpipev"}
    if "hsdp" in words:  # what needs zero needs one of the two; several micro-batches
        words = {word: None for word in words if word != "zero"} | {"8-samples": None}
    return " ".join(["4-layers" if chunks else "", "masked", *words])


QUICK_OPTIONS = [
    "1f1b", "interleaved", "dualpipev", "late-reduce", "zero-late", "hsdp", "fp8-moments", "selective",
    "smooth",
]  # fmt: skip


@pytest.mark.parametrize("name", slow_but(OPTION, *QUICK_OPTIONS))
def test_an_option_alone(runs: Runs, name: str) -> None:
    assert_close_to_one_rank(runs, words_of(name))


@pytest.mark.parametrize(("one", "other"), slow_but(RUN, *QUICK_PAIRS))
def test_two_options_together(runs: Runs, one: str, other: str) -> None:
    assert_close_to_one_rank(runs, words_of(one, other), steps=2 if (one, other) in QUICK_PAIRS else 8)


def test_what_cannot_work_is_refused_before_any_process_group() -> None:
    """With its own reason each, wherever the run is started; all others are accepted."""
    assert not dist.is_initialized()
    assert max(ranks_of(words_of(*pair)) for pair in RUN) == 8
    for pair in PAIRS:
        config, ranks = config_of(words_of(*pair), device="auto"), ranks_of(words_of(*pair))
        if frozenset(pair) not in REASONS:
            check_config(config, ranks)
            continue
        with pytest.raises(ConfigError) as error:
            check_config(config, ranks)
        assert REASONS[frozenset(pair)] in str(error.value), pair
        assert "try " in str(error.value), pair


def test_graphs_on_a_cpu_are_refused() -> None:
    with pytest.raises(ConfigError, match="device is cpu, which has no CUDA graphs"):
        check_layout(config_of("graphs"), 1)


# --- against the same run without an option --------------------------------------------------------------------------

BITS: dict[str, list[str]] = {
    # Under two data-parallel ranks every sum has two terms.
    "zero": ["dp2 masked", "pp2 dp2 zb-h1"],
    "late-reduce": ["dp2 zero"],
    "late-gather": ["dp2 zero"],
    # FSDP reduces gradients micro-batch by micro-batch: with one there is only one order.
    "fsdp": ["dp2 2-samples current tied", "dp2 2-samples bf16 delayed"],
    "fp8-gather": [
        "fsdp dp2 bf16 delayed", "zero dp2 current late-gather late-reduce", "zero dp2 custom",
        "4-layers zero pp2 dp2 zb-v current",
    ],
    "zb-h1": ["pp2 clip", "pp2 calibrated"],
    "dualpipev": ["4-layers pp2 clip zb-v"],
    "full": ["pp2 dropout"],
    "norms": ["tp2 delayed"],
    "activation": ["pp2"],
    "offload": ["tp2 delayed"],
    "offload-1 selective": ["pp2"],
    "graphs": ["fp16 dropout"],
}  # fmt: skip
SLOW_BITS: dict[str, list[str]] = {
    "zero late-reduce": ["moe tp2 dp2 ep2"],
    "zero": [
        "tp2 dp2 delayed", "dp2 bf16", "dp2",
        "dp2 tied", "dp2 gpt2", "dp2 delayed", "dp2 current", "dp2 fp64", "dp2 bf16-reduce bf16-moments", "tp2 dp2",
        "tp2 no-sp dp2 tied", "cp2", "4-layers pp2 dp2 zb-v tied", "pp2 dp2", "pp2 dp2 tied",
        "pp2 dp2 tied large-buckets", "pp2 dp2 current", "4-layers pp2 dp2 zb-v mtp",
    ],
    # Two replicas on two ranks: each has all weights and sums its micro-batches, of which a tied weight has two terms.
    "hsdp": [f"dp2 {words}" for words in ("", "2-samples tied", "8-samples delayed", "bf16 current", "masked")],
    "late-reduce": [
        "4-layers pp2 dp2 zb-v", "dp4 8-samples hsdp", "4-layers pp2 dp2 interleaved", "dp4 8-samples hsdp bf16-reduce",
        "pp2 dp4 8-samples hsdp tied", "tp2 dp4 hsdp gpt2 tied", "moe dp4 ep2 8-samples fsdp", "moe tp2 dp4 ep2 hsdp",
    ],
    "fsdp": [f"dp2 2-samples {words}" for words in (
        "", "delayed", "fp64", "bf16 bf16-reduce", "blockwise", "rowwise", "calibrated", "current selective",
        "current fprop-bf16", "current dgrad-bf16", "current wgrad-bf16", "moe ep2", "moe ep2 bf16 delayed",
    )],
    "fp8-gather": [
        "zero dp2 delayed some-layers", "zero dp2 delayed smooth",
        "fsdp dp2 delayed tied", "dp4 hsdp delayed", "zero tp2 no-sp dp2 delayed smooth",
        "fsdp dp3 current", "zero current", "zero dp2 current tied", "zero dp2 delayed gpt2", "zero dp2 bf16 delayed",
        "zero tp2 dp2 current", "fsdp current", "fsdp dp2 current", "fsdp dp2 static", "fsdp dp2 delayed smooth",
        "fsdp dp2 current some-layers", "fsdp pp2 dp2 delayed", "fsdp dp2 delayed full", "tp2 dp4 hsdp current tied",
        "pp2 dp4 8-samples hsdp delayed", "zero dp2 delayed-2", "zero dp2 static",
        "zero dp2 current wgrad-bf16 power-of-two", "zero dp2 current smooth", "zero dp2 delayed fp64",
        "zero dp2 bf16 current bf16-moments", "zero dp2 delayed full", "zero cp2 current", "zero pp2 dp2 delayed tied",
        "fsdp moe dp4 ep2 current", "fsdp tp2 dp2 current",
    ],
    "zb-h1": ["pp2 delayed smooth", "pp2 nvfp4", "pp2 delayed wgrad-bf16", "pp2 delayed dgrad-bf16"],
    "zb-v full": [f"4-layers tp2 pp2 3-samples no-clip {words}" for words in ("delayed", "wide seq256 blockwise")],
    **{mode: ["tp2", "pp2", "tp2 delayed", "tp2 delayed dropout", "pp2 delayed", "mtp pp2 delayed",
              "tp2 current", "tp2 blockwise", "pp2 current", "pp2 blockwise"]
       for mode in ("full", "norms", "activation", "offload", "offload-1 selective")},
}  # fmt: skip
QUICK_MODES = ["tp2 no-sp delayed", "pp2 zb-h1 delayed"]
SLOW_MODES = [
    "pp2 delayed report", "delayed qk-norm",
    "tp2 wide seq256 blockwise", "tp2 nvfp4", "cp2 current", "tp2 gpt2 delayed", "tp2 delayed dropout", "moe tp2 ep2",
    "tp2 no-sp", "tp2 rowwise", "tp2 delayed smooth", "cp2", "pp2 zb-h1", "tp2 gpt2",
    "tp2 rowwise wgrad-bf16", "tp2 calibrated", "pp2 nvfp4", "cp2 delayed",
    "4-layers pp2 interleaved current", "tp2 gelu current", "tp2 parallel-block delayed",
]  # fmt: skip
ONE_RANK_MODES = ["full", "full-first", "norms", "activation", "attention", "selective", "offload", "offload full"]
QUICK_BITS = [(option, words) for option, cases in BITS.items() for words in cases]
QUICK_BITS += itertools.product(["selective"], QUICK_MODES)
MORE_BITS = [(option, words) for option, cases in SLOW_BITS.items() for words in cases]
MORE_BITS += itertools.product(["selective", "offload-1 selective"], QUICK_MODES + SLOW_MODES)
MORE_BITS += itertools.product([*ONE_RANK_MODES, "offload-1 selective"], ["", "delayed", "current", "blockwise"])
OTHER_PLACEMENT = {"interleaved", "zb-v", "dualpipev", "zb-v full"}
"""Options under which a rank has other layers, so that the norm is summed in another order."""
NOT_GATHERED_IN_FP8 = {"custom": 2, "some-layers": 5, "moe": 4}
"""Of 8 linear layers."""


@pytest.mark.parametrize(("option", "words"), slow_but(dict.fromkeys(QUICK_BITS + MORE_BITS), *QUICK_BITS))
def test_an_option_changes_no_bit(runs: Runs, option: str, words: str) -> None:
    expected, found = runs.of(words), runs.of(f"{words} {option}")
    assert len(set(losses(found.curve))) == len(found.curve)
    if option in OTHER_PLACEMENT and not OTHER_PLACEMENT & set(words.split()):
        assert losses(found.curve) == losses(expected.curve)
    else:
        assert found.curve == expected.curve
    assert found.state == expected.state
    assert found.records == expected.records
    config, ranks = config_of(words), ranks_of(words)
    if "clip" in words.split():
        assert min(norm for _, norm in expected.curve if norm) > config.optimizer.clip_grad_norm
    if option == "zero":
        shards = ranks // (config.parallel.tensor * config.parallel.pipeline)
        for key in found.elements[0].keys() & {"exp_avg", "exp_avg_sq", "master"}:
            assert all(rank[key] == rank["weights"] for rank in expected.elements)
            assert all(rank[key] <= rank["gradients"] // shards for rank in found.elements)
            total = sum(rank["weights"] for rank in expected.elements)
            assert sum(rank[key] for rank in found.elements) == total // shards
    if option == "fp8-gather":
        layers = 4 * config.model.num_layers // config.parallel.pipeline
        layers -= sum(NOT_GATHERED_IN_FP8.get(word, 0) for word in words.split())
        assert all(rank["released"] == layers for rank in found.elements)
        if config.parallel.zero:  # nothing of the values is left
            assert all(rank["released storage"] == layers for rank in found.elements)


def losses(curve: Curve) -> list[float]:
    return [loss for loss, _ in curve]


SUMS = {
    "zero": ["dp4", "cp2 dp2"],
    "fsdp": [
        "dp2", "dp2 full", "pp2 dp2 tied", "dp3", "tp2 dp2",
        "tied", "dp2 tied", "dp2 gpt2", "dp2 8-samples", "tp2 no-sp dp2 tied", "cp2 dp2", "pp2 dp2",
        "4-layers pp2 dp2 interleaved", "dp2 offload", "moe dp4 ep2", "deepseek tp2 dp2 ep4", "moe tp2 dp2",
    ],
    "hsdp": [
        "dp4", "dp4 8-samples tied", "dp4 full", "tp2 dp4", "pp2 dp4 tied", "cp2 dp2 gpt2",
        "4-layers pp2 dp4 8-samples interleaved", "moe dp4 ep2", "moe tp2 dp4 ep2",
    ],
}  # fmt: skip
SUMS_CASES = [(option, words) for option, cases in SUMS.items() for words in cases]


@pytest.mark.parametrize(("option", "words"), slow_but(SUMS_CASES, SUMS_CASES[0], *SUMS_CASES[2:5]))
def test_an_option_changes_only_the_order_of_sums(runs: Runs, option: str, words: str) -> None:
    expected, found = runs.of(words), runs.of(f"{words} {option}")
    for a, b in zip(found.curve, expected.curve, strict=True):
        assert a == pytest.approx(b, rel=1e-6)
    if option == "zero":
        for whole, shard in zip(expected.elements, found.elements):
            assert shard["exp_avg"] <= shard["gradients"] // 4 < whole["exp_avg"] * 0.27
        assert sum(shard["exp_avg"] for shard in found.elements) == expected.elements[0]["exp_avg"]


# --- pipeline schedules ----------------------------------------------------------------------------------------------

SCHEDULES = ["", "zb-h1", "interleaved", "zb-v", "dualpipev"]
PIPELINES = [
    "4-layers qkv-bias no-clip dropout pp2",
    "8-layers qkv-bias no-clip pp4 4-samples delayed",
    "4-layers qkv-bias no-clip pp2 1-sample tied delayed",
    "8-layers qkv-bias no-clip pp4 3-samples tied",
    "8-layers qkv-bias no-clip pp4 8-samples delayed",
]


@pytest.mark.parametrize("words", slow_but(PIPELINES, PIPELINES[0]))
def test_schedules_and_one_rank_train_the_same(runs: Runs, words: str) -> None:
    """A micro-batch is computed alike under every schedule, and gradients are summed in the order of the micro-batches.
    So no bit depends on the schedule, nor on the number of stages, as long as no sum over the whole model enters
    (clipping) and the embedding is not shared between two layers of one stage."""
    one_rank, plain = runs.one_rank(f"{words}"), runs.of(words)
    for schedule in SCHEDULES:
        found = runs.of(f"{words} {schedule}")
        assert losses(found.curve) == losses(plain.curve)
        assert found.state == plain.state
    assert plain.curve[0] == (one_rank.curve[0][0], pytest.approx(one_rank.curve[0][1], rel=1e-5))
    if "tied" not in words.split():
        assert losses(plain.curve) == losses(one_rank.curve)
        assert plain.state == one_rank.state
    loose = 2e-2 if "delayed" in words else 1e-5
    assert [norm for _, norm in plain.curve] == pytest.approx([norm for _, norm in one_rank.curve], rel=loose)


def test_stages_by_hand_and_one_rank_train_the_same(runs: Runs) -> None:
    words = "8-layers qkv-bias no-clip pp2 zb-v 1+3+3+1"
    found, expected = runs.of(words), runs.one_rank(words)
    assert losses(found.curve) == losses(expected.curve)
    assert found.state == expected.state
