"""The config of a run: its fields (`schema`), read from YAML (`load`), checked as a whole (`checks`)."""

from megafp8.config.checks import check_layout
from megafp8.config.errors import ConfigError, Problem
from megafp8.config.load import load_config
from megafp8.config.schema import (
    CheckpointConfig,
    Config,
    CustomRule,
    DataConfig,
    EvaluateConfig,
    Fp8Config,
    LatentAttentionConfig,
    LoggingConfig,
    LongRopeConfig,
    MaskedLmConfig,
    ModelConfig,
    MoeConfig,
    OptimizerConfig,
    ParallelConfig,
    PrefixLmConfig,
    RopeScaling,
    SpecialTokens,
    TokenizerConfig,
    TrainingConfig,
    YarnConfig,
)

__all__ = [
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "CustomRule",
    "DataConfig",
    "EvaluateConfig",
    "Fp8Config",
    "LatentAttentionConfig",
    "LoggingConfig",
    "LongRopeConfig",
    "MaskedLmConfig",
    "ModelConfig",
    "MoeConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrefixLmConfig",
    "Problem",
    "RopeScaling",
    "SpecialTokens",
    "TokenizerConfig",
    "TrainingConfig",
    "YarnConfig",
    "check_layout",
    "load_config",
]
