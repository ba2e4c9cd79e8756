"""megafp8: Megatron-style pretraining of GPT models in FP8, launched by torchrun from one YAML file."""

__version__ = "0.1.0.dev0"
