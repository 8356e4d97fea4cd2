"""Made-up texts, the same on every machine, for tasks that read a corpus."""

from __future__ import annotations

import random
from pathlib import Path

from kveval.words import word_pairs


def write_book(path: Path) -> None:
    """300 paragraphs of three sentences."""
    sentences = ("The sun shines on hill {}.", "We walk home by road {} again.", "What do you hold, number {}?")
    path.write_text("\n\n".join(" ".join(s.format(i * i) for s in sentences) for i in range(300)))


def write_code(folder: Path, files: int = 8, functions: int = 12) -> str:
    """Python files whose functions all have a name and a docstring of their own; the corpus of them."""
    words = iter(word_pairs(random.Random(0), 2 * files * functions))
    for number in range(files):
        parts = ["import math\n"]
        for _ in range(functions):
            name, clue = next(words).replace("-", "_"), next(words).replace("-", " ")
            parts.append(
                f'def {name}(road):\n    """Follow the {clue} home."""\n    green = math.floor(road)\n'
                "    yellow = green + road\n    return yellow\n"
            )
        (folder / f"part_{number}.py").write_text("\n\n".join(parts))
    return f"file:{folder}/*.py"
