"""RG-LRU, a gated linear recurrence with one number per channel (arXiv:2402.19427)."""
