"""Expert parallelism: the experts of a layer divided over a group of ranks, and the tokens that travel to them."""
