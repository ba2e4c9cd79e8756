"""The job: build from a config, train, evaluate, log, save, resume and stop cleanly."""
