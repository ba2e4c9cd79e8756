"""Models: the blocks that contain the layers, the pipeline stages of GPT, and the stages of T5."""
