"""Layers: one folder for each kind, and the modules that all kinds share.

A folder has up to five files: `record` (config keys and their rules, without torch), `module` (the `nn.Module`), `op`
(forward and backward), `kernel` (Triton) and `reference` (PyTorch code that defines what the kernel computes). If a
folder has several files of one type, their names have a prefix, for example `paged_kernel`. A file may import files of
its own type and of the types before it in this order: reference, kernel, op, module.
"""
