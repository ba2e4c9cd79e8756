"""The optimizer section of the config as the optimizer's own values, and its check against the model's tensors."""

from __future__ import annotations

import math

from megafp8.config import Config, OptimizerConfig, ParallelConfig
from megafp8.distributed.sharding import spec_of
from megafp8.dtypes import DTYPES
from megafp8.fp8 import Fp8Manager
from megafp8.models.build import build_stage
from megafp8.models.context import planning_context
from megafp8.optimizer.muon import MuonSettings
from megafp8.optimizer.param_groups import ParamGroup, check_groups


def param_groups(o: OptimizerConfig) -> list[ParamGroup]:
    """`optimizer.groups`."""
    return [ParamGroup(tuple(group.match), group.learning_rate_scale, group.weight_decay) for group in o.groups]


def muon_settings(o: OptimizerConfig) -> MuonSettings | None:
    """`optimizer.muon`; None where all weights are updated by AdamW."""
    if o.name != "muon":
        return None
    return MuonSettings(
        momentum=o.muon.momentum,
        nesterov=o.muon.nesterov,
        scaling=o.muon.scaling,
        dtype=DTYPES[o.muon.newton_schulz_dtype],
    )


def hidden_learning_rate_scale(config: Config) -> float:
    """What the learning rate of hidden matrices is multiplied by: Muon's own, and muP's function of the width.

    Under muP updates must have a spectral norm that does not depend on the width (Yang et al. 2023, arXiv:2310.17813).
    That of AdamW's grows with it, that of Muon's scaled like AdamW's with its root, that of Muon's original not.
    """
    o, width = config.optimizer, config.model.width_multiplier
    if o.name == "adamw":
        return 1 / width
    own = 1.0 if o.muon.learning_rate is None else o.muon.learning_rate / o.learning_rate
    return own / math.sqrt(width) if o.muon.scaling == "match_rms_adamw" else own


def check_optimizer(config: Config) -> None:
    """ValueError if a pattern of `optimizer.groups` does not fit the model. Needs no process group."""
    if not config.optimizer.groups:
        return
    whole = config.model_copy(update={"parallel": ParallelConfig()})
    stage = build_stage(
        config.model,
        planning_context(whole, Fp8Manager(None, amax_group=None)),
        layers=config.model.layers,
        positions=config.position_rows,
    )
    check_groups((spec_of(param) for param in stage.parameters()), param_groups(config.optimizer))
