"""Optimizers (AdamW, Lion, Muon): state and its storage, clipping, updates of weights, learning-rate schedules."""
