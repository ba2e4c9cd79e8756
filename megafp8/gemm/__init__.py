"""FP8 matrix products: dispatch over cuBLASLt, torch's scaled_mm, and emulation."""
