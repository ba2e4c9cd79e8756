"""Proof that a config computes on several local ranks what it computes on one, with a certificate."""
