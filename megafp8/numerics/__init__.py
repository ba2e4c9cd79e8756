"""Definition of FP8 in megafp8, in plain PyTorch: formats, quantized tensors, quantizers and recipes."""
