"""CPU time of the corruptions of test images, by kind and severity.

    python tools/benchmarks/corruptions.py [--side 32] [--images 1000] [--channels 3]

One thread; microseconds of CPU time per image.  Nothing is asserted.
"""

from __future__ import annotations

import argparse
import time

import torch

from vitlab.data.corruption import corrupt
from vitlab.data.datasets.base import COMPUTED_CORRUPTIONS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--channels", type=int, default=3, choices=(1, 3))
    args = parser.parse_args()
    torch.set_num_threads(1)
    small = torch.rand(args.images, args.channels, 8, 8, generator=torch.Generator().manual_seed(0))
    large = torch.nn.functional.interpolate(small, (args.side, args.side), mode="bilinear")
    x_BCHW, id_B = (255 * large).to(torch.uint8), torch.arange(args.images)
    total = 0.0
    for name in COMPUTED_CORRUPTIONS:
        figures = []
        for severity in range(1, 6):
            corrupt(x_BCHW[:2], name, severity, id_B[:2])  # computes tables that are cached
            began = time.process_time()
            corrupt(x_BCHW, name, severity, id_B)
            figures.append(1e6 * (time.process_time() - began) / args.images)
        total += sum(figures) / len(figures)
        print(f"{name:20}" + "".join(f"{figure:9.0f}" for figure in figures))
    print(
        f"mean {total / len(COMPUTED_CORRUPTIONS):.0f} us, {1e6 * len(COMPUTED_CORRUPTIONS) / total:,.0f} images/s of a core"
    )


if __name__ == "__main__":
    main()
