"""Models: the blocks that layers stand in, the pipeline stages of GPT, and the stages of T5."""
