"""Whether SASS writes the registers of A of a wgmma that is at work: nothing may until it is waited for.

ptxas does not see to that where the source has what comes next in other variables: it gave the next P the
registers of this one's, and the numbers were wrong.
"""

from __future__ import annotations

import re

_LINE = re.compile(r"^\s*(?:(\.L_x_\d+):|/\*[0-9a-f]{4,}\*/\s+(.*?);)", re.MULTILINE)
_FROM_REGISTERS = re.compile(r"[HQI]GMMA\S* R\d+, R(\d+), gdesc")
_NO_RESULT = re.compile(r"ST|BAR|SYNCS|ISETP|FSETP|RED|[HQI]GMMA|BRA|R2UR|UTM|MEMBAR")
_JUMP = re.compile(r"BRA\S* .*`\((\.L_x_\d+)\)")


def overwritten(sass: str) -> list[tuple[str, str]]:
    """(wgmma, what writes a register of its A before it is waited for) of a kernel, along every path."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for label, instruction in _LINE.findall(sass):
        if label:
            labels[label] = len(lines)
        else:
            lines.append(instruction)
    found = []
    for at, line in enumerate(lines):
        if product := _FROM_REGISTERS.search(line):
            first = int(product[1])
            held = range(first, first + 4)
            found += [
                (line, lines[i]) for i in _until_waited_for(lines, labels, at + 1) if _writes(lines[i], held)
            ]
    return found


def _until_waited_for(lines: list[str], labels: dict[str, int], at: int) -> set[int]:
    seen: set[int] = set()
    paths = [at]
    while paths:
        at = paths.pop()
        while at < len(lines) and at not in seen and "DEPBAR.LE gsb0, 0x0" not in lines[at]:
            seen.add(at)
            jump = _JUMP.search(lines[at])
            if jump:
                paths.append(labels[jump[1]])
            if "EXIT" in lines[at] or (jump and re.match(r"BRA (?:`|\()", lines[at])):
                break
            at += 1
    return seen


def _writes(line: str, registers: range) -> bool:
    result = re.match(r"(?:@!?U?P\w+ )?([A-Z][\w.]*)\s+(?:P\w, )?R(\d+)", line)
    if not result or _NO_RESULT.match(result[1]):
        return False
    first = int(result[2])
    count = 4 if ".128" in result[1] else 2 if "WIDE" in result[1] or ".64" in result[1] else 1
    return any(register in registers for register in range(first, first + count))
