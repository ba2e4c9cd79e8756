"""Recovery from faults: hangs, loss spikes, slow ranks, wrong results, and faults that tests inject.

Described in docs/resilience.md. Errors and exit codes: `megafp8.training.errors`; ranks that differ:
`megafp8.training.consistency`; replicas: `megafp8.training.replicas`.
"""
