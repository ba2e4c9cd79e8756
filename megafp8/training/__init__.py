"""Training job: build a model from a config, train, evaluate, log, save, resume and stop cleanly."""
