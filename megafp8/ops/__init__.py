"""Operations of the model that run in bf16 or FP8: linear layers, norms, activations, rotary embedding, embedding look-up."""
