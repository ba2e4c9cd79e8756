"""The delta rule, on which Gated DeltaNet and Kimi Delta Attention are built."""
