"""Download one pinned package from PyPI, checked against its hash."""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Package:
    """One file on PyPI: a wheel, or the source archive where `source` is set."""

    name: str
    version: str
    sha256: str
    source: bool = False


def download(package: Package, into: Path) -> Path:
    """Download a package without its dependencies and return the file.

    pip compares the hash before it looks into the file.

    Raises:
        subprocess.CalledProcessError: no such file, no network, or another hash; pip has
            said which.
    """
    with tempfile.TemporaryDirectory(dir=into) as temporary:
        requirement = Path(temporary) / "requirement.txt"
        requirement.write_text(
            f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n"
        )
        target = Path(temporary) / "download"
        kind = ["--no-binary", ":all:"] if package.source else ["--only-binary", ":all:"]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--require-hashes", "--dest", str(target)]
        subprocess.run([*command, *kind, "-r", str(requirement)], check=True)
        (file,) = target.iterdir()
        return file.rename(into / file.name)
