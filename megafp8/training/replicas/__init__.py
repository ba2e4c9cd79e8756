"""Training job as one of several replicas, which are whole copies of the model that may leave and rejoin.

`megafp8.parallel.replicas` has the communication between replicas. The modules here are:

job           training loop, which forms a quorum before each step
trainer       training step, which combines gradients with the other replicas
membership    place of this replica, state that a peer copies, and the check that all replicas hold the same state
rounds        steps between outer steps, for replicas connected by slow links
"""
