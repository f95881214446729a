#!/usr/bin/env python3
"""Writes docs/PORTABILITY.md from what the steps have left: usage: report.py FOLDER > docs/PORTABILITY.md

A cell of the table holds a letter for each piece of evidence that a step has recorded, and nothing else.
"""

import collections
import pathlib
import string
import sys

HERE = pathlib.Path(__file__).parent
BACK_ENDS = {"vulkan": "Vulkan", "dx12": "DX12", "metal": "Metal", "webgpu": "WebGPU", "gles": "GLES"}


def evidence(folder, steps):
    """(back end, tier, stage) -> letters, and letter -> (how, step)."""
    legend, cells = {}, collections.defaultdict(set)
    letters = iter(string.ascii_uppercase)
    for step in steps:
        path = folder / "evidence" / f"{step}.tsv"
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines:
            back_end, tier, stage, how = line.split("\t")
            # The same words on two back ends are two facts.
            key = (back_end, how)
            if key not in legend:
                legend[key] = (next(letters), step)
            cells[back_end, tier, stage].add(legend[key][0])
    return cells, legend


def rows(folder):
    """Stages with their tiers, in the order of the list of variants."""
    found = {}
    for line in (folder / "shaders" / "variants.tsv").read_text().splitlines():
        _, stage, tiers, _ = line.split("\t")
        for tier in tiers.split(","):
            found.setdefault(stage, []).append(tier)
    return [(stage, tier) for stage, tiers in found.items() for tier in dict.fromkeys(tiers)]


def said(path):
    return path.read_text().splitlines() if path.exists() else []


def main():
    folder = pathlib.Path(sys.argv[1])
    steps = (HERE / "steps.txt").read_text().split()
    cells, legend = evidence(folder, steps)
    print("# Portability\n")
    print("Written by `make test-portability`, on a machine with Debian 12 and no GPU. Each letter is a piece of evidence")
    print("that a step has recorded for the stage on the tier; a cell without one says so.\n")
    print("| stage | tier | " + " | ".join(BACK_ENDS.values()) + " |")
    print("|---|---|" + "---|" * len(BACK_ENDS))
    for stage, tier in rows(folder):
        marks = [" ".join(sorted(cells[b, tier, stage])) or "not covered" for b in BACK_ENDS]
        print(f"| {stage} | {tier} | " + " | ".join(marks) + " |")
    print("\n| | back end | how it is known | step |\n|---|---|---|---|")
    for (back_end, how), (letter, step) in legend.items():
        print(f"| {letter} | {BACK_ENDS[back_end]} | {how} | [{step}](../portability/steps/{step}.sh) |")
    print("\n## What each step found\n")
    for step in steps:
        comment = []
        for line in (HERE / "steps" / f"{step}.sh").read_text().splitlines()[1:]:
            if not line.startswith("#"):
                break
            comment.append(line.removeprefix("#").strip())
        print(f"**{step}.** {' '.join(comment)}")
        for line in said(folder / f"{step}.shown"):
            print(f"- {line}")
        why = said(folder / f"{step}.why")
        for line in why:
            print(f"- could not run: {line}")
        if not why and not said(folder / f"{step}.shown"):
            print("- failed")
        print()
    print((HERE / "limits.md").read_text(), end="")


main()
