"""All Triton kernels. Each names its reference in PyTorch, which specifies it and which it must equal bit for bit."""
