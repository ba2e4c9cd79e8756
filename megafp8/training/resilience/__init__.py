"""Recovery from faults: hangs, loss spikes, slow ranks, wrong results, and faults that tests inject.

docs/resilience.md describes these features. Related modules are `megafp8.training.errors` (errors and exit codes),
`megafp8.training.consistency` (ranks with different state) and `megafp8.training.replicas` (replicas).
"""
