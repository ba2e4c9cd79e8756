"""Convert checkpoints between formats, one tensor at a time, without process groups."""
