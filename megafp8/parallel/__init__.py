"""Communication between ranks: collectives, overlap of tensor-parallel communication with GEMMs, symmetric memory."""
