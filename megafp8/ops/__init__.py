"""Operations of the model, in bf16 or FP8: linear layers, norms, activations, rotary embedding, embedding look-up."""
