"""Screenshots of the guides, from a run of the quickstart: ``python docs/pictures.py FOLDER``.

The quickstart is run and explained in the folder, which takes about two minutes, and ``explain.png`` and ``mlflow.png``
are written beside the guides, and ``quickstart.png``, the top of its report, one folder above.  It needs Chromium
(``chromium`` in the path).  Numbers differ slightly on another processor.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

GUIDES = Path(__file__).parent / "pages" / "guides"
VITLAB = [str(Path(sys.executable).with_name("vitlab"))]


def main(folder: Path) -> None:
    """Run and explain the quickstart in a folder, and write the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for words in (["run", "quickstart"], ["explain", "quickstart", "--image", "test:0", "--image", "test:3"]):
        subprocess.run([*VITLAB, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    report = folder.resolve() / "vitlab-runs" / "studies" / "quickstart" / "report" / "report.html"
    shoot(report.as_uri(), (1200, 900), "../quickstart")
    page = folder.resolve() / "explained" / "quickstart" / "index.html"
    shoot(page.as_uri(), (1000, 1330), "explain")
    with serving(folder) as address:
        shoot(address, (1800, 900), "mlflow", wait_s=40, width=1335)  # without MLflow's assistant, at the right


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve the folder's MLflow inside the block, and give the address of the quickstart's curves."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [*VITLAB, "ui", "quickstart", "--port", port, "--no-browser"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, start_new_session=True) as server:
        assert server.stdout is not None
        try:
            yield next(word for line in server.stdout for word in line.split() if word.startswith("http"))
        finally:
            os.killpg(server.pid, 15)


def shoot(address: str, size: tuple[int, int], name: str, *, wait_s: int = 2, width: int | None = None) -> None:
    """Write a screenshot of a page, in 256 colours, to the folder of guides.

    Args:
        address: of the page.
        size: of the window.
        name: of the picture.
        wait_s: time for the scripts of the page.
        width: to which the picture is cut; by default the window's.
    """
    picture = GUIDES / f"{name}.png"
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={size[0]},{size[1]}"]
    options += [f"--virtual-time-budget={1000 * wait_s}", f"--screenshot={picture}"]
    subprocess.run(["chromium", *options, address], check=True, stderr=subprocess.DEVNULL)
    with Image.open(picture) as shot:
        cut = shot.convert("RGB").crop((0, 0, width or size[0], size[1]))
    cut.quantize(256, kmeans=3, dither=Image.Dither.NONE).save(picture, optimize=True)
    print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    if len(sys.argv) != 2 or shutil.which("chromium") is None:
        sys.exit("usage: python docs/pictures.py FOLDER, with chromium in the path")
    main(Path(sys.argv[1]))
