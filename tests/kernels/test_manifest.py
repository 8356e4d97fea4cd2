"""kernels/manifest.yaml: the format, and that every entry compiles within its budget."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kveval.content import content_dir
from kveval.errors import ConfigError
from kveval.kernels.compiler import Variant, compile_kernel
from kveval.kernels.cubin import Resources, resources
from kveval.kernels.manifest import MANIFEST, ManifestEntry, read_manifest

ENTRY = """- kernel: append fp8
  source: append.cu
  entry: append
  defines: {ELEMENT: 1, HEAD_DIM: 128}
  archs: [sm_80, sm_90a]
  max_registers: 64
"""


def read(tmp_path: Path, text: str) -> tuple[ManifestEntry, ...]:
    (tmp_path / MANIFEST).write_text(text)
    return read_manifest(tmp_path)


def test_an_entry(tmp_path: Path) -> None:
    (entry,) = read(tmp_path, ENTRY)
    assert entry.variant == Variant("append.cu", "append", (("ELEMENT", 1), ("HEAD_DIM", 128)), fast_math=False)
    assert (entry.archs, entry.max_registers) == (["sm_80", "sm_90a"], 64)
    assert read(tmp_path, ENTRY + "  fast_math: true\n")[0].variant.fast_math


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ENTRY.replace("max_registers: 64", "max_registers: 300"), r":6: max_registers: .*less than or equal to 255"),
        (ENTRY.replace("sm_80", "hopper"), r":5: archs\.0: "),
        (ENTRY.replace("[sm_80, sm_90a]", "[]"), r":5: archs: "),
        (ENTRY.replace("ELEMENT: 1", "ELEMENT: one"), r":4: defines\.ELEMENT: "),
        (ENTRY.replace("append.cu", "../append.cu"), r":2: source: "),
        (ENTRY + "  registers: 3\n", r":7: registers: Extra inputs"),
        (ENTRY + ENTRY.replace("128", "64"), r":7: 'append fp8' repeats 'append fp8'"),
        (ENTRY + ENTRY.replace("append fp8", "append again"), r":7: 'append again' repeats 'append fp8'"),
        ("kernels: []", "valid list"),
    ],
)
def test_a_wrong_entry_is_located(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (Resources(64, 0, 1024), ""),
        (Resources(65, 0, 0), "65 registers, 64 are allowed"),
        (Resources(64, 8, 0), "8 bytes of stack, where spilled registers go"),
        (Resources(70, None, 0), "70 registers, 64 are allowed; a stack without bound"),
    ],
)
def test_the_budget(tmp_path: Path, found: Resources, problem: str) -> None:
    (entry,) = read(tmp_path, ENTRY)
    assert entry.over_budget(found) == problem


def test_every_source_is_in_the_manifest() -> None:
    assert {entry.source for entry in read_manifest()} == {path.name for path in content_dir("kernels").glob("*.cu")}


@pytest.mark.skipif(sys.platform != "linux", reason="there is no NVRTC for this system")
@pytest.mark.parametrize(
    ("entry", "arch"),
    [pytest.param(entry, arch, id=f"{entry.kernel}-{arch}") for entry in read_manifest() for arch in entry.archs],
)
def test_every_entry_compiles_without_warnings_within_its_budget(entry: ManifestEntry, arch: str) -> None:
    binary = compile_kernel(entry.variant, arch)
    assert not binary.log
    assert not entry.over_budget(resources(binary.cubin)[entry.entry])
