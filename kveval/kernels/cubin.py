"""What a kernel takes of a GPU, read from the compiled file itself: an ELF whose .nv.info sections say it.

No tool of the CUDA toolkit is needed. Attribute numbers are those that `cuobjdump -elf` prints as EIATTR_REGCOUNT and
EIATTR_MIN_STACK_SIZE.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from kveval.errors import KernelError

__all__ = ["Resources", "resources"]

REGISTERS, STACK = 0x2F, 0x12
SIZED = 0x04
"""An attribute's format whose 16-bit field is the length of the payload behind it; the others have no payload."""

UNKNOWN = 0xFFFFFFFF

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_ATTRIBUTE = struct.Struct("<BBH")


@dataclass(frozen=True)
class Resources:
    """What one kernel takes.

    Attributes:
        registers: of each thread.
        stack_bytes: local memory of each thread, that of functions it calls included; None where the compiler can't
            tell because of recursion (older ones leave the recursive part out). Spilled registers lie there, so 0 means
            that nothing is spilled.
        shared_bytes: static shared memory of a block; from compute capability 9.0 on with the 1,024 bytes that the
            system takes, if there is any.
    """

    registers: int
    stack_bytes: int | None
    shared_bytes: int


@dataclass(frozen=True)
class _Section:
    name: str
    data: bytes
    size: int
    link: int


def resources(cubin: bytes) -> dict[str, Resources]:
    """The resources of every kernel in a cubin, by entry name.

    Raises:
        KernelError: it is not a whole 64-bit little-endian ELF with the sections that NVIDIA's compilers write.
    """
    try:
        return _read(cubin)
    except (struct.error, ValueError, LookupError, StopIteration) as error:
        raise KernelError(
            f"a compiled kernel can't be read ({error}).", remedy="Remove the folder cubins from kveval's cache."
        ) from error


def _read(cubin: bytes) -> dict[str, Resources]:
    sections = _sections(cubin)
    info = next(section for section in sections if section.name == ".nv.info")
    symbols = sections[info.link]
    names = _symbol_names(symbols.data, sections[symbols.link].data)
    shared = {section.name: section.size for section in sections}
    found: dict[int, dict[str, int]] = {REGISTERS: {}, STACK: {}}
    for attribute, payload in _attributes(info.data):
        if attribute in found:
            symbol, value = struct.unpack("<II", payload)
            found[attribute][names[symbol]] = value
    return {
        name: Resources(
            registers=count,
            stack_bytes=None if found[STACK][name] == UNKNOWN else found[STACK][name],
            shared_bytes=shared.get(f".nv.shared.{name}", 0),
        )
        for name, count in found[REGISTERS].items()
    }


def _sections(elf: bytes) -> list[_Section]:
    ident, *_, offset, _, _, _, _, size, count, names_at = _HEADER.unpack_from(elf)
    if ident[:6] != b"\x7fELF\x02\x01" or size != _SECTION.size:
        raise ValueError("no 64-bit ELF")
    headers = [_SECTION.unpack_from(elf, offset + i * size) for i in range(count)]
    empty = 8  # SHT_NOBITS: takes no room in the file
    data = [b"" if kind == empty else elf[at : at + n] for _, kind, _, _, at, n, *_ in headers]
    return [
        _Section(_text(data[names_at], name), content, n, link)
        for content, (name, _, _, _, _, n, link, *_) in zip(data, headers, strict=True)
    ]


def _symbol_names(table: bytes, strings: bytes) -> list[str]:
    return [_text(strings, name) for name, *_ in _SYMBOL.iter_unpack(table)]


def _text(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(info):
        kind, attribute, length = _ATTRIBUTE.unpack_from(info, at)
        at += _ATTRIBUTE.size
        payload = b""
        if kind == SIZED:
            payload = info[at : at + length]
            at += length
        yield attribute, payload
