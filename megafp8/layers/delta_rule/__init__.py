"""Delta rule: the recurrence of Gated DeltaNet and Kimi Delta Attention."""
