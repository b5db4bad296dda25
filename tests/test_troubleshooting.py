"""docs/troubleshooting.md quotes messages as the code says them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
QUOTED = re.findall(r"^### `(.+)`$", (ROOT / "docs/troubleshooting.md").read_text(), re.M)


def spoken() -> str:
    """The source with its strings joined and what is filled in as `…`."""
    files = [
        ROOT / "train.py",
        *(f for d in ("model", "data", "kernels") for f in ROOT.glob(f"{d}/*.py")),
    ]
    text = "\n".join(file.read_text() for file in files)
    text = re.sub(r'"\s*\n\s*f?"', "", text)
    return re.sub(r"\{[^{}\n]*\}", "…", text)


@pytest.mark.parametrize("message", QUOTED)
def test_a_message_in_the_docs_is_one_that_is_said(message):
    assert message.strip("… ") in spoken()


def test_there_are_messages():
    assert len(QUOTED) > 15
