"""Generate tables, plots and the order of attention=auto from the declarations and the results:

    python scripts/report.py              everything
    python scripts/report.py --check      write nothing; exit code 1 if anything is out of date
    python scripts/report.py --redraw     redraw all plots, even of unchanged rows, after a change of code
    python scripts/report.py --audit      write nothing; print what each claim compares, how far its figures
                                          are from its thresholds; exit code 1 if the compared rows differ in
                                          a field that the claim does not name

capabilities  attention/README.md: what each implementation supports, and how its memory grows
results       docs/measuring.md: speeds as a table and a picture, from results/attention/<gpu>.jsonl
overview      results/overview.svg: the README's picture, memory and tokens/s against the context
advice        attention/README.md: the fastest implementations for each kind of call
auto          attention/auto_table.py: the order in which attention=auto tries implementations
ladder        ops/README.md: the stages of the CUDA ladder, from results/cuda_ladder/<gpu>.jsonl
studies       results/README.md, the index; each study's page and plots, results/<study>/README.md, <gpu>*.svg
claims        results/CLAIMS.md: claims of papers and tutorials, and what was measured

Name some of these parts to write only them. Run this after scripts/bench_attention.py, and after changing
what an implementation declares.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # python scripts/<command>.py: see there
    import _checkout  # noqa: F401

from conf.values import UserError
from scripts.measure.machine import ROOT

PARTS = ("capabilities", "results", "overview", "advice", "auto", "ladder", "studies", "claims")
UNMEASURED = (
    "Nothing is measured yet: `python scripts/bench_attention.py` on a GPU, then `scripts/report.py`."
)

Row = dict[str, Any]


def with_block(text: str, name: str, content: str) -> str:
    """`text` with `content` between its markers of that name. Raises UserError where it has none."""
    pattern = rf"(<!-- {name}: [^>]*-->\n).*?(\n?<!-- end of {name} -->)"
    found, count = re.subn(pattern, lambda m: f"{m[1]}\n{content}\n\n{m[2].lstrip()}", text, flags=re.DOTALL)
    if count != 1:
        raise UserError(
            f"{count} blocks named {name}: there has to be one, between <!-- {name}: ... --> and "
            f"<!-- end of {name} -->"
        )
    return found


def written(root: Path, parts: tuple[str, ...] = PARTS, redraw: bool = False) -> dict[Path, str]:
    """What the files below `root` should hold; of pictures, those whose rows have changed (redraw: all)."""
    from attention import registry
    from scripts import bench_ladder
    from scripts.measure.claims import Results
    from scripts.measure.claims.page import page
    from scripts.measure.report import (
        advice,
        attention_report,
        capabilities,
        overview,
        ranking,
        results_page,
        summary,
    )
    from scripts.measure.report.figures import is_drawn
    from scripts.measure.rows import by_gpu

    measured = by_gpu(root / "results" / "attention")
    rows = [row for found in measured.values() for row in found]
    generated = [row for found in by_gpu(root / "results" / "generate").values() for row in found]
    beside = [row for found in by_gpu(root / "results" / "hopper").values() for row in found]
    ranks = ranking.ranking(ranking.newest(rows, beside)) | ranking.compiled_decode(generated)
    advised = root / "attention" / "README.md"
    files: dict[Path, str] = {}

    def put(path: Path, name: str, content: str) -> None:
        files[path] = with_block(files.get(path) or text_of(path), name, content)

    if "capabilities" in parts:
        peaks = [row for found in by_gpu(root / "results" / "attention_memory").values() for row in found]
        memory = capabilities.memory([*rows, *peaks])
        put(advised, "capabilities", capabilities.table(registry.implementations(), memory))
    if "results" in parts:
        # one picture and one table: of the GPU with the most rows
        gpu = max(measured, key=lambda name: len(measured[name]), default=None)
        said = UNMEASURED if gpu is None else summary.block(measured[gpu], gpu)
        put(root / "docs" / "measuring.md", "results", said)
        if gpu is not None:
            path = root / "results" / "attention" / f"{gpu}.svg"
            if redraw or not is_drawn(measured[gpu], path):
                files[path] = summary.picture(measured[gpu])
                passes = attention_report.pictures(measured[gpu])
                files |= {path.with_name(f"{gpu}_{passed}.svg"): text for passed, text in passes.items()}
    if "overview" in parts:
        files |= overview.written(root / "results", redraw)
    if "advice" in parts:
        put(advised, "advice", advice.table(ranks) if ranks else UNMEASURED)
    if "auto" in parts:
        files[root / "attention" / "auto_table.py"] = ranking.table_source(ranks)
    if "ladder" in parts:
        stages = by_gpu(root / "results" / bench_ladder.STUDY)
        said = "\n\n".join(map(bench_ladder.block, stages.values()))
        put(root / "ops" / "README.md", "ladder", said or UNMEASURED.replace("attention", "ladder"))
    if "studies" in parts:
        files |= results_page.written(root / "results", redraw)
    if "claims" in parts:
        files[root / "results" / "CLAIMS.md"] = page(Results(root / "results"))
    return files


def text_of(path: Path) -> str:
    if not path.is_file():
        raise SystemExit(f"{path} is not there: --root needs a folder with all files of this repository.")
    return path.read_text(encoding="utf-8")


def audit(results: Path) -> None:
    """Print what the claims compare. Raises SystemExit where one compares what it does not name."""
    from scripts.measure.claims import Results
    from scripts.measure.claims.audit import audited

    text, wrong = audited(Results(results))
    print(text)
    if wrong:
        numbers = ", ".join(map(str, wrong))
        raise SystemExit(f"\nin claim {numbers} contestants differ in more than the claim names: see FAULT.")


def main() -> None:
    from scripts.measure.rows import rows_file

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if out of date")
    parser.add_argument("--redraw", action="store_true", help="draw pictures of unchanged rows again, too")
    parser.add_argument("--audit", action="store_true", help="of claims: write nothing, check comparisons")
    parser.add_argument(
        "--html", type=rows_file, metavar="FILE", help="all tables and pictures as one page, too"
    )
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="the checkout whose results are read and files written"
    )
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: choose of {', '.join(PARTS)}")
    if not (options.root / "results").is_dir():
        parser.error(
            f"--root {options.root}: it has no results; give a folder with all files of this repository"
        )
    if options.audit:
        audit(options.root / "results")
        return
    old = []
    for path, text in written(options.root, tuple(options.parts) or PARTS, options.redraw).items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        old.append(path)
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for path in old:
        print(f"{path.relative_to(options.root)} {'is out of date' if options.check else 'written'}")
    if options.check and old:
        raise SystemExit("Run python scripts/report.py, look at the changes and commit them.")
    if not old:
        print("all up to date")
    if options.html:
        from scripts.measure.report.html_report import page

        options.html.parent.mkdir(parents=True, exist_ok=True)
        options.html.write_text(page(options.root / "results"), encoding="utf-8")
        print(options.html)


if __name__ == "__main__":
    # What is declared depends on neither a GPU nor the interpreter: asked before torch and triton look.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.pop("TRITON_INTERPRET", None)
    main()
