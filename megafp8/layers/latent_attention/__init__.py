"""Multi-head latent attention (arXiv:2405.04434)."""
