#!/usr/bin/env python3
"""Writes docs/PORTABILITY.md from what the steps have left: usage: report.py FOLDER > docs/PORTABILITY.md

A row for each stage and tier in the list of variants (src/kernels/variants.rs) that the step `translate` has left, and in
its cells a letter for each piece of evidence that a step of this run has recorded, and nothing else. It is an error when
the list is not of this run, lacks a shader that there is, or when there is evidence for a stage that it does not have.
"""

import collections
import pathlib
import string
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
BACK_ENDS = {"vulkan": "Vulkan", "dx12": "DX12", "metal": "Metal", "webgpu": "WebGPU", "gles": "GLES"}
# Weakest last. See `evidence` in lib.sh.
KINDS = {
    "ran": "**ran**",
    "stand-in": "stand-in",
    "checked": "checked",
}
# Tiers that a back end never offers: DX12, browsers and GL have no cooperative matrices, and GL has no subgroups.
NO_SUCH_TIER = {("dx12", "matrix"), ("webgpu", "matrix"), ("gles", "matrix"), ("gles", "subgroup")}


def rows(folder):
    """Stages with their tiers, in the order of the list of variants."""
    found = {}
    for line in (folder / "shaders" / "variants.tsv").read_text().splitlines():
        _, stage, tiers, _ = line.split("\t")
        for tier in tiers.split(","):
            found.setdefault(stage, []).append(tier)
    files = {path.stem for path in (HERE.parent / "shaders").glob("*.wgsl")}
    if files != found.keys():
        sys.exit(f"shaders and the list of variants differ: {sorted(files ^ found.keys())}")
    return [(stage, tier) for stage, tiers in found.items() for tier in dict.fromkeys(tiers)]


def evidence(folder, steps, rows):
    """(back end, tier, stage) -> kind -> letters, and (back end, kind, how) -> (letter, step)."""
    legend, cells = {}, collections.defaultdict(lambda: collections.defaultdict(list))
    letters = iter(string.ascii_uppercase + string.ascii_lowercase)
    for step in steps:
        path = folder / "evidence" / f"{step}.tsv"
        lines = path.read_text().splitlines() if path.exists() else []
        for line in dict.fromkeys(lines):
            back_end, tier, stage, kind, how = line.split("\t")
            # Stages that pack rows for matrices need none, and tests run them on lower tiers: what that shows, it shows of theirs.
            if (stage, tier) not in rows:
                tier = next((own for name, own in rows if name == stage), tier)
            if (stage, tier) not in rows or back_end not in BACK_ENDS or kind not in KINDS:
                sys.exit(f"{step}: evidence for what is in no list: {line}")
            # A variant of another tier too, or one that packs rows for products that the back end lacks.
            if (back_end, tier) in NO_SUCH_TIER:
                continue
            # The same words on two back ends are two facts.
            key = (back_end, kind, how)
            if key not in legend:
                legend[key] = (next(letters), step)
            cells[back_end, tier, stage][kind].append(legend[key][0])
    return cells, legend


def cell(kinds, back_end, tier):
    if (back_end, tier) in NO_SUCH_TIER:
        return "–"
    found = [f"{word} {' '.join(sorted(set(kinds[kind])))}" for kind, word in KINDS.items() if kinds[kind]]
    return "; ".join(found) or "not covered"


def said(path):
    return path.read_text().splitlines() if path.exists() else []


def commit():
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def main():
    folder = pathlib.Path(sys.argv[1])
    steps = (HERE / "steps.txt").read_text().split()
    unlisted = {path.stem for path in (HERE / "steps").glob("*.sh")} ^ set(steps)
    if unlisted:
        sys.exit(f"steps and steps.txt differ: {sorted(unlisted)}")
    table = rows(folder)
    cells, legend = evidence(folder, steps, set(table))

    print("# Portability\n")
    print("Written by `make test-portability`, on a machine with Debian 12 and no GPU, at commit", f"{commit()}.")
    print("A row for each stage and tier that [`variants.rs`](../src/kernels/variants.rs) lists. A cell says how the stage is")
    print("known to work there, and each letter is a piece of evidence that a step of this run has recorded:\n")
    print("- **ran**: compiled by this driver, run, and compared with the oracle;")
    print("- stand-in: the same, on something that poses as the back end and is not what its users have;")
    print("- checked: translated, compiled or linted, not run;")
    print("- not covered: no step of this run shows anything;")
    print("- –: the back end has no such tier.\n")
    print("| stage | tier | " + " | ".join(BACK_ENDS.values()) + " |")
    print("|---|---|" + "---|" * len(BACK_ENDS))
    for stage, tier in table:
        marks = [cell(cells[b, tier, stage], b, tier) for b in BACK_ENDS]
        print(f"| {stage} | {tier} | " + " | ".join(marks) + " |")
    print("\n| | back end | kind | how it is known | step |\n|---|---|---|---|---|")
    for (back_end, kind, how), (letter, step) in legend.items():
        print(f"| {letter} | {BACK_ENDS[back_end]} | {KINDS[kind]} | {how} | [{step}](../portability/steps/{step}.sh) |")
    print("\n## What each step found\n")
    for step in steps:
        comment = []
        for line in (HERE / "steps" / f"{step}.sh").read_text().splitlines()[1:]:
            if not line.startswith("#"):
                break
            comment.append(line.removeprefix("#").strip())
        seconds = " ".join(said(folder / "evidence" / f"{step}.seconds"))
        print(f"**{step}** ({seconds or 0} s). {' '.join(comment)}")
        why = said(folder / f"{step}.why")
        found = said(folder / f"{step}.shown")
        passed = (folder / "evidence" / f"{step}.passed").exists()
        end = [] if passed or why else ["FAILED" if seconds else "not run"]
        lines = (found if passed or why else []) + [f"could not run: {line}" for line in why] + end
        print("\n".join(f"- {line}" for line in lines) + "\n")
    print((HERE / "limits.md").read_text(), end="")


main()
