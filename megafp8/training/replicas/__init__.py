"""A training job as one of several replicas: whole copies of the model that may leave and rejoin
(`megafp8.parallel.replicas`).

job           the training loop, which forms a quorum before each step
trainer       the training step, which combines gradients with the other replicas
membership    this replica's place, the state that a peer copies, the check that all replicas hold the same
rounds        steps between outer steps, for replicas that are joined by slow links
"""
