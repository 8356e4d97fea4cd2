"""The docs say what the code does."""

from __future__ import annotations

import importlib.util
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from kveval.config import load_config
from kveval.formats.layout import layer_formats
from kveval.formats.spec import get_scheme
from kveval.geometry import LayerGeometry
from kveval.report.format_text import describe, format_renderable

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def make_reference():
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "scripts" / "make_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reference_is_up_to_date():
    for name, text in make_reference().pages().items():
        assert (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8") == text, (
            f"{name} is out of date: run python scripts/make_reference.py"
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page}: {target}"


def code_blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [block for found, block in blocks if found == language]


def test_the_formats_howto_shows_what_its_sweep_gives(tmp_path):
    (tmp_path / "sweep.yaml").write_text(code_blocks("how-to/add-a-format.md", "yaml")[0], encoding="utf-8")
    schemes = {scheme.name: scheme for scheme in load_config(tmp_path / "sweep.yaml").schemes}
    shown = re.split(r"^\$ ", code_blocks("how-to/add-a-format.md", "")[0], flags=re.MULTILINE)[1:]
    seen = 0
    for name in schemes:
        console = Console(file=io.StringIO(), width=100, color_system=None)
        console.print(format_renderable(describe(schemes[name])))
        lines = {line.rstrip() for line in console.file.getvalue().splitlines()}
        for command, *printed in (block.splitlines() for block in shown):
            if f"show-format {name} " in command:
                assert set(printed) - {"..."} <= lines
                seen += 1
    assert seen == 2


def test_the_formats_page_counts_short_sequences_right():
    text = (ROOT / "docs" / "explanation" / "formats.md").read_text(encoding="utf-8")
    (head,) = re.findall(r"^\| \| 128 tokens \|.*$", text, flags=re.MULTILINE)
    lengths = [int(n.replace(",", "")) for n in re.findall(r"[\d,]+", head)]
    shape = LayerGeometry(kind="full", kv_heads=8, head_dim_k=128, head_dim_v=128)
    for name in ("kivi2", "kivi4", "int4_g64"):
        (row,) = re.findall(rf"^\| `{name}`.*?\|(.*)\|$", text, flags=re.MULTILINE)
        (layer,) = layer_formats(get_scheme(name), [shape])
        counted = [f"{length * 8 * 512 / layer.nbytes(length, shape):.2f}x" for length in lengths]
        assert [cell.strip() for cell in row.split("|")] == counted
