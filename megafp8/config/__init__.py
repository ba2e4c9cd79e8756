"""Config of a run: its keys (`schema`), loading from YAML (`load`), and rules between keys (`checks`)."""

from megafp8.config.checks import canonical_streams_problem, check_layout, fewest_ranks
from megafp8.config.json_schema import json_schema
from megafp8.config.load import config_and_overrides, load_config
from megafp8.config.model_keys import model_problems, model_spec, with_keys
from megafp8.config.schema import (
    CheckpointConfig,
    Config,
    CustomRule,
    DataConfig,
    EvaluateConfig,
    FaultConfig,
    Fp8Config,
    GrpoConfig,
    InferenceConfig,
    LoggingConfig,
    LossSpikeConfig,
    MaskedLmConfig,
    OptimizerConfig,
    OuterConfig,
    ParallelConfig,
    PrefixLmConfig,
    ProfileConfig,
    ReplicasConfig,
    ResilienceConfig,
    SpecialTokens,
    StageConfig,
    TokenizerConfig,
    TrainingConfig,
    is_text,
)
from megafp8.config.stages import PlannedStage, config_at, end_of_stage, planned_stages, stage_at
from megafp8.host.problems import ConfigError, Problem
from megafp8.layers.attention.record import AttentionConfig, LongRopeConfig, RopeScaling, RotaryKeys, YarnConfig
from megafp8.layers.experts.record import MoeConfig, MoeFfnConfig
from megafp8.layers.gated_delta_net.record import GatedDeltaNetConfig
from megafp8.layers.latent_attention.record import LatentAttentionConfig, LatentMixerConfig
from megafp8.layers.mlp.record import MlpConfig

__all__ = [
    "AttentionConfig",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "CustomRule",
    "DataConfig",
    "EvaluateConfig",
    "FaultConfig",
    "Fp8Config",
    "GatedDeltaNetConfig",
    "GrpoConfig",
    "InferenceConfig",
    "LatentAttentionConfig",
    "LatentMixerConfig",
    "LoggingConfig",
    "LongRopeConfig",
    "LossSpikeConfig",
    "MaskedLmConfig",
    "MlpConfig",
    "MoeConfig",
    "MoeFfnConfig",
    "OptimizerConfig",
    "OuterConfig",
    "ParallelConfig",
    "PlannedStage",
    "PrefixLmConfig",
    "Problem",
    "ProfileConfig",
    "ReplicasConfig",
    "ResilienceConfig",
    "RopeScaling",
    "RotaryKeys",
    "SpecialTokens",
    "StageConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "YarnConfig",
    "canonical_streams_problem",
    "check_layout",
    "config_and_overrides",
    "config_at",
    "end_of_stage",
    "fewest_ranks",
    "is_text",
    "json_schema",
    "load_config",
    "model_problems",
    "model_spec",
    "planned_stages",
    "stage_at",
    "with_keys",
]
