"""Take pictures of report pages in a real browser, to be looked at.

    python scripts/screenshot_report.py out/sentiment --to out/pictures
    python scripts/screenshot_report.py out/a out/b --to out/pictures --browser chromium

Each page is taken wide and narrow, light and dark, and printed: NAME-light.png, NAME-dark.png,
NAME-narrow.png and NAME.pdf. The browser is Chromium or Chrome, found on the path; on Debian
`apt-get install chromium`.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_WIDE, _NARROW = 1280, 390
# Taller than any page; what is empty below it is cut off.
_HEIGHT = 9000
_MARGIN = 24


def screenshot(browser: str, page: Path, folder: Path, name: str) -> list[Path]:
    """Take all pictures of one page.

    Args:
        browser: the program.
        page: a ``_report.html``.
        folder: gets the pictures.
        name: begins their names.

    Returns:
        The pictures and the print.

    Raises:
        SystemExit: the browser failed, with what it said.
    """
    url = page.resolve().as_uri()
    pictures = [
        _picture(browser, url, folder / f"{name}-light.png", dark=False),
        _picture(browser, url, folder / f"{name}-dark.png", dark=True),
        _narrow(browser, url, folder / f"{name}-narrow.png"),
    ]
    pdf = folder / f"{name}.pdf"
    _run(browser, "--no-pdf-header-footer", f"--print-to-pdf={pdf}", url)
    return [*pictures, pdf]


def _picture(browser: str, url: str, path: Path, *, dark: bool) -> Path:
    # Blink counts dark as 0 and light as 1.
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    _run(browser, scheme, f"--window-size={_WIDE},{_HEIGHT}", f"--screenshot={path}", url)
    _trim(path)
    return path


def _narrow(browser: str, url: str, path: Path) -> Path:
    """A browser's window has a least width; a frame has none."""
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder) / "frame.html"
        frame.write_text(
            f'<body style="margin:0"><iframe src="{url}" width="{_NARROW}" '
            f'height="{_HEIGHT}" style="border:0"></iframe>'
        )
        size = f"--window-size={_NARROW},{_HEIGHT}"
        _run(browser, size, f"--screenshot={path}", frame.as_uri())
    with Image.open(path) as image:
        image.crop((0, 0, _NARROW, image.height)).save(path)
    _trim(path)
    return path


def _trim(path: Path) -> None:
    """Cut off the empty rows at the end."""
    with Image.open(path) as image:
        plain = image.convert("RGB")
        empty = Image.new("RGB", plain.size, plain.getpixel((0, plain.height - 1)))
        used = _last_row(plain, empty)
        image.crop((0, 0, image.width, min(image.height, used + _MARGIN))).save(path)


def _last_row(plain: Image.Image, empty: Image.Image) -> int:
    from PIL import ImageChops

    box = ImageChops.difference(plain, empty).getbbox()
    return plain.height if box is None else box[3]


def _run(browser: str, *arguments: str) -> None:
    # As root, which containers often are, the browser's sandbox does not start.
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    done = subprocess.run(
        [browser, *options, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stderr}{browser} ended with exit code {done.returncode}")


def find_browser(named: str | None) -> str:
    """Give the browser to use.

    Raises:
        SystemExit: there is none.
    """
    candidates: Sequence[str] = (named,) if named else _BROWSERS
    found = next((path for path in map(shutil.which, candidates) if path), None)
    if found is None:
        sys.exit(f"none of {', '.join(candidates)} is on the path; name one with --browser")
    return found


def main() -> None:
    """Read the command line and take the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("outputs", nargs="+", type=Path, help="output directories")
    parser.add_argument("--to", type=Path, required=True, help="the folder of the pictures")
    parser.add_argument("--browser", help="the browser's program")
    options = parser.parse_args()
    browser = find_browser(options.browser)
    options.to.mkdir(parents=True, exist_ok=True)
    for output in options.outputs:
        page = output / "_report.html"
        if not page.is_file():
            sys.exit(f"{page} does not exist")
        for path in screenshot(browser, page, options.to, output.name):
            print(path)


if __name__ == "__main__":
    main()
