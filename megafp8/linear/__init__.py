"""Core of linear layers: the three GEMMs, the forms of a weight, and the autograd Functions."""
