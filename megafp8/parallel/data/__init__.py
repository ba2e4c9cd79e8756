"""Data parallelism: gradient buckets, ZeRO, FSDP, and weights gathered in FP8."""
