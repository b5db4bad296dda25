"""The code blocks of README.md and docs/: shell commands and Python, as a reader copies them."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("python", "make", "torchrun")
SHELLS = ("bash", "sh", "shell", "console")


@dataclass(frozen=True)
class Block:
    """A code block: its page, the info string of its fence ("" if indented), and its text."""

    page: Path
    info: str
    text: str

    @property
    def is_python(self) -> bool:
        indented = not self.info and re.match(r"(from|import) ", self.text)
        return self.info == "python" or bool(indented)

    @property
    def quoted_file(self) -> Path | None:
        """The source file that a block quotes, as ```` ```python kernels/... ```` says."""
        language, _, file = self.info.partition(" ")
        return ROOT / file if language == "python" and file else None

    def commands(self) -> list[str]:
        """What is to be typed into a shell: lines that begin with a program, comments taken off."""
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        lines = [line.removeprefix("$ ") for line in lines]
        if self.info not in SHELLS:
            lines = [line for line in lines if line.split(" ")[0] in PROGRAMS]
        found = [shlex.split(line, comments=True) for line in lines]
        return [shlex.join(words) for words in found if words]


def blocks(page: Path) -> list[Block]:
    """The blocks of a page in their order, fenced ones and those indented by four spaces."""
    found, lines, before = [], page.read_text().splitlines(), ""
    while lines:
        line = lines.pop(0)
        if line.startswith("```"):
            end = lines.index("```")
            found.append(Block(page, line[3:].strip(), "\n".join(lines[:end])))
            lines = lines[end + 1 :]
        elif line.startswith("    ") and not before.strip():
            text = [line]
            while lines and (lines[0].startswith("    ") or not lines[0].strip()):
                text.append(lines.pop(0))
            found.append(Block(page, "", "\n".join(part[4:] for part in text).rstrip()))
        before = line
    return found


ALL = [block for page in PAGES for block in blocks(page)]
