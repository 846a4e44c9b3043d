"""results/CLAIMS.md: every claim of the sources beside our answer."""

from __future__ import annotations

from scripts.measure.claims import UNTESTED, VERDICTS, Answer, Claim, Results, all_claims, answered
from scripts.measure.claims.mistakes import MISTAKES

HEAD = """# What the sources claim, and what we measured

Tutorials on optimising attention and the FlashAttention papers make {n} claims. Each is answered by rows of
`results/`: a threshold in `scripts/measure/claims/` decides whether it holds, and its sentence is composed of
the figures (`python scripts/report.py claims` writes this page; with `--audit` it prints what each claim
compares, and fails where that differs in anything that the claim does not name).

{counts}"""


def page(results: Results) -> str:
    found = answered(results)
    head = HEAD.format(n=len(found), counts=counted(found) + ".")
    parts = [
        head,
        table(found),
        "## Claim by claim",
        *(section(claim, found[claim.number]) for claim in all_claims()),
    ]
    parts += ["## Where the sources err or contradict each other", mistakes(results)]
    parts += ["## Verdicts", verdicts(found)]
    return "\n\n".join(parts) + "\n"


def counted(found: dict[int, Answer]) -> str:
    """How many of each verdict, in a sentence."""
    one = {UNTESTED: "is not tested here"}
    many = {"holds": "hold", "holds in part": "hold in part", "does not hold": "do not hold"}
    count = {verdict: sum(answer.verdict == verdict for answer in found.values()) for verdict in VERDICTS}
    said = [
        f"{n} {one.get(verdict, verdict) if n == 1 else many.get(verdict, f'are {verdict}')}"
        for verdict, n in count.items()
        if n
    ]
    return " and ".join(filter(None, (", ".join(said[:-1]), said[-1])))


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def table(found: dict[int, Answer]) -> str:
    lines = ["| # | claim | their figures | ours | verdict |", "|---|---|---|---|---|"]
    for claim in all_claims():
        ours, n = found[claim.number], claim.number
        figures = claim.theirs + (" (paper)" if claim.source == "paper" else "")
        cells = (f"[{n}](#claim-{n})", claim.claim, figures, ours.figure or "-", f"**{ours.verdict}**")
        lines.append(f"| {' | '.join(map(cell, cells))} |")
    return "\n".join(lines)


def section(claim: Claim, ours: Answer) -> str:
    lines = [f"### Claim {claim.number}", f"*{claim.claim}*"]
    if ours.verdict == UNTESTED:
        return "\n\n".join([*lines, f"**Not tested here**: {ours.why.rstrip('.')}."])
    lines.append(f"**{ours.verdict.capitalize()}**: {ours.figure}. {ours.why}")
    return "\n\n".join([*lines, f"{ours.gpu}; {ours.command}"])


def mistakes(results: Results) -> str:
    said = []
    for mistake in MISTAKES:
        about = ", ".join(f"[{n}](#claim-{n})" for n in mistake.about)
        evidence = mistake.evidence(results)
        text = f"- **{mistake.said}** ({about}) {mistake.fact}"
        said.append(text + (f" {evidence}" if evidence and not evidence.startswith("\n") else evidence))
    return "\n".join(said)


def verdicts(found: dict[int, Answer]) -> str:
    lines = ["| verdict | claims | which |", "|---|---|---|"]
    for verdict in VERDICTS:
        which = [f"[{n}](#claim-{n})" for n, one in found.items() if one.verdict == verdict]
        lines.append(f"| {verdict} | {len(which)} | {', '.join(which)} |")
    return "\n".join(lines)
