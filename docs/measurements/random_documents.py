"""Write a small Megatron-LM data set of random documents of bytes: `random_documents.py PREFIX COUNT`.

For measurements that run jobs where no corpus is at hand; docs/measurements/*/two_agents.sh call it.
"""

import struct
import sys

import numpy as np

prefix, count = sys.argv[1], int(sys.argv[2])
generator = np.random.default_rng(0)
lengths = generator.integers(200, 2000, count)
documents = [np.append(generator.integers(1, 8, n).cumsum() % 256, 256).astype(np.uint16) for n in lengths]
sizes = np.array([len(d) for d in documents], np.int32)
pointers = np.concatenate([[0], np.cumsum(sizes[:-1].astype(np.int64) * 2)])
np.concatenate(documents).tofile(f"{prefix}.bin")
header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(sizes), len(sizes) + 1)
with open(f"{prefix}.idx", "wb") as index:
    index.write(header + sizes.tobytes() + pointers.tobytes() + np.arange(len(sizes) + 1).tobytes())
