"""FP8 matrix products, with backends for cuBLASLt, torch's scaled_mm, and emulation."""
