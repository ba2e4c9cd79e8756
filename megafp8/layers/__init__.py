"""Layers: a folder for each kind, and what all kinds share.

A folder has up to five files: `record` (the keys and their rules, without torch), `module` (the `nn.Module`), `op`
(forward and backward), `kernel` (Triton) and `reference` (the PyTorch code that specifies the kernel). Several files
of one floor have a word in front, as `paged_kernel`. A file imports files of its own floor and of the floors below:
reference, kernel, op, module.
"""
