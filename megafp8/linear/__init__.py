"""The linear core: three GEMMs, forms of a weight, and the autograd Functions over them."""
