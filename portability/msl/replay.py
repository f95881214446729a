#!/usr/bin/env python3
"""Repeats traced stages on CPU threads, with the MSL that naga wrote for them and a stand-in for Apple's library.

usage: replay.py [--repeat] TRACE SHADERS FOLDER [--simdgroup N]

TRACE is what tests/trace.rs writes, or a folder of what tests/common/traced.rs leaves; SHADERS what tests/translate leaves.
FOLDER takes the compiled kernels. Prints the kernels that ran, one a line as `tier stage`, after every case has matched
the oracle, or what the device of the tests had computed; ends with 1 where one has not. With --repeat TRACE is one case that
tests/common/replayed.rs wants computed and compares itself: what its buffers hold afterwards goes to a file beside it, and
the kernels that ran are added to FOLDER/ran.txt.
"""

import argparse
import ctypes
import json
import math
import pathlib
import re
import struct
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
# As the tests' own for the tiers without matrices.
TOLERANCE = 1e-4
# Values below this are as good as zero.
TINY = 1e-20
# Files that are compiled at the same time.
PARTS = 2


def signature(msl):
    """Threads of a group, and (type, name, attribute) of every argument of the kernel."""
    head = re.search(r"\[\[max_total_threads_per_threadgroup\((\d+)\)\]\] kernel void main_\((.*?)\n\) \{", msl, re.S)
    arguments = []
    for line in head[2].strip().split("\n"):
        kind, name, attribute = re.fullmatch(r",?\s*(.*?)\s*&?\s*(\w+)(?: \[\[(.*)\]\])?", line.strip()).groups()
        arguments.append((kind, name, attribute))
    return int(head[1]), arguments


def argument(kind, name, attribute):
    """The C++ expression for one argument."""
    values = {
        "threadgroup_position_in_grid": "workgroup",
        "thread_index_in_threadgroup": "lane",
        "thread_index_in_simdgroup": "lane % SIMDGROUP",
        "simdgroup_index_in_threadgroup": "lane / SIMDGROUP",
        "threads_per_simdgroup": "SIMDGROUP",
    }
    if attribute in values:
        return values[attribute]
    if name == "_buffer_sizes":
        return "buffer_sizes"
    if kind.startswith("threadgroup"):
        return f"shared_{name}"
    slot = re.fullmatch(r"buffer\((\d+)\)", attribute)[1]
    kind = re.sub(r"\b(device|constant|const)\b", "", kind).strip()
    return f"*static_cast<{kind}*>(buffers[{slot}])"


def wrapper(number, path):
    """A namespace with the shader and a C function that runs it over a grid."""
    msl = subprocess.check_output(["awk", "-f", HERE / "once.awk", path], text=True)
    threads, arguments = signature(msl)
    sizes = re.findall(r"uint size(\d+);", msl)
    slots = dict(re.findall(r"// size(\d+) is of buffer\((\d+)\)", msl))
    shared = [(k.removeprefix("threadgroup").strip(), n) for k, n, a in arguments if k.startswith("threadgroup")]
    fill = " ".join(f"buffer_sizes.size{n} = sizes[{slots[n]}];" for n in sizes)
    declared = f"_mslBufferSizes buffer_sizes{{}}; {fill}" if sizes else ""
    locals_ = " ".join(f"static {kind} shared_{name};" for kind, name in shared)
    call = ", ".join(argument(*a) for a in arguments)
    return f"""namespace shader_{number} {{
{msl}
extern "C" void run_{number}(const uint32_t* grid, void* const* buffers, const uint32_t* sizes) {{
    {declared} {locals_}
    for (uint z = 0; z < grid[2]; z++) for (uint y = 0; y < grid[1]; y++) for (uint x = 0; x < grid[0]; x++) {{
        metal::uint3 workgroup(x, y, z);
        metal::run_threadgroup({threads}, SIMDGROUP, [&](uint lane) {{ main_({call}); }});
    }}
}}
}}
"""


def numbers_of(shaders):
    """The number of every label's file."""
    table = [line.split("\t") for line in (shaders / "variants.tsv").read_text().splitlines()]
    return {label: number for number, _, _, label in table}


def command(simdgroup):
    """How a library of kernels is compiled."""
    return ["clang++-16", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", f"-DSIMDGROUP={simdgroup}", f"-I{HERE / 'shim'}"]


def kept(shaders, labels, folder, simdgroup):
    """The kernels of these labels, each compiled once for all cases."""
    numbers, kernels = numbers_of(shaders), {}
    for label in labels:
        number = numbers[label]
        library, source = folder / f"{number}-{simdgroup}.so", folder / f"{number}.cpp"
        msl = shaders / "metal" / f"{number}.checked.metal"
        if not library.exists() or library.stat().st_mtime < msl.stat().st_mtime:
            source.write_text("#include <metal_stdlib>\n" + wrapper(number, msl))
            subprocess.run([*command(simdgroup), source, "-o", library], check=True)
        kernels[label] = getattr(ctypes.CDLL(str(library.resolve())), f"run_{number}")
    return kernels


def repeat(args):
    """Computes the one case of a test."""
    case = json.loads(args.trace.read_text())
    labels = sorted({d["shader"] for d in case["dispatches"]})
    memory = run(case, kept(args.shaders, labels, args.folder, args.simdgroup))
    args.trace.with_suffix(".after").write_bytes(b"".join(bytes(m) for m in memory))
    with open(args.folder / "ran.txt", "a") as ran:
        ran.writelines(f"{case['tier']} {label.split('[')[0]}\n" for label in labels)


def compiled(shaders, labels, folder, simdgroup):
    """The kernels of these labels, as loaded libraries."""
    numbers = numbers_of(shaders)
    folder.mkdir(parents=True, exist_ok=True)
    parts = [labels[i::PARTS] for i in range(PARTS) if labels[i::PARTS]]
    running = []
    for i, part in enumerate(parts):
        source = ["#include <metal_stdlib>\n"]
        for label in part:
            source.append(wrapper(numbers[label], shaders / "metal" / f"{numbers[label]}.checked.metal"))
        (folder / f"kernels-{i}.cpp").write_text("".join(source))
        library = folder / f"kernels-{simdgroup}-{i}.so"
        library.unlink(missing_ok=True)
        arguments = [*command(simdgroup), folder / f"kernels-{i}.cpp", "-o", library]
        running.append((library, part, subprocess.Popen(arguments)))
    kernels = {}
    for library, part, compiler in running:
        if compiler.wait() != 0:
            sys.exit(f"{library} does not compile")
        loaded = ctypes.CDLL(str(library.resolve()))
        kernels |= {label: getattr(loaded, f"run_{numbers[label]}") for label in part}
    return kernels


def content(buffer):
    """The bytes that a buffer starts with."""
    if "fill" in buffer:
        return bytearray(bytes.fromhex(buffer["fill"]) * (buffer["size"] // 4))
    return bytearray(bytes.fromhex(buffer["bytes"]))


def run(case, kernels):
    """The buffers after the dispatches of the case."""
    memory = [(ctypes.c_char * len(c)).from_buffer(c) for c in map(content, case["buffers"])]
    address = [ctypes.addressof(m) for m in memory]
    for dispatch in case["dispatches"]:
        params = ctypes.create_string_buffer(bytes.fromhex(dispatch["params"]), 256)
        views = dispatch["buffers"]
        buffers = [ctypes.addressof(params)] + [address[v["buffer"]] + v["offset"] for v in views]
        sizes = [256] + [v["size"] for v in views]
        grid = dispatch["grid"]
        if isinstance(grid, dict):
            grid = struct.unpack_from("<3I", memory[grid["buffer"]], grid["offset"])
        kernel = kernels[dispatch["shader"]]
        kernel((ctypes.c_uint32 * 3)(*grid), (ctypes.c_void_p * len(buffers))(*buffers), (ctypes.c_uint32 * len(sizes))(*sizes))
    return memory


def off_oracle(case, memory):
    """Largest difference over the largest expected value of a layer's output."""
    expected = case["expected"]
    got = struct.unpack_from(f"<{len(expected)}f", memory[case["out"]], 0)
    (status,) = struct.unpack_from("<I", memory[case["status"]], 0)
    if status != case["expected_status"]:
        return math.inf
    off = max(abs(g - e) if g == g else math.inf for g, e in zip(got, expected))
    return off / max(abs(e) for e in expected)


def is_number(bits):
    """Zero or a float of full precision: no id, no count, nothing that was left unwritten."""
    return bits & 0x7FFFFFFF == 0 or 0 < bits >> 23 & 0xFF < 0xFF


def is_tiny(bits):
    """A float so small that some devices take it for zero. Ids in these runs are smaller still."""
    magnitude = bits & 0x7FFFFFFF
    return magnitude == 0 or 0xFFF < magnitude < 0x800000


def off_device(case, memory):
    """The same over all buffers: words are equal, or both are floats, whose differences count."""
    worst = 0.0
    for after, got in zip(map(content, case["after"]), memory):
        n = len(after) // 4
        if bytes(got)[: 4 * n] == after[: 4 * n]:
            continue
        words = zip(struct.unpack_from(f"<{n}I", after), struct.unpack_from(f"<{n}I", got))
        floats = zip(struct.unpack_from(f"<{n}f", after), struct.unpack_from(f"<{n}f", got))
        off, most = 0.0, TINY
        for (word, got_word), (value, got_value) in zip(words, floats):
            both = is_number(word) and is_number(got_word)
            if both:
                off, most = max(off, abs(value - got_value)), max(most, abs(value))
            elif word != got_word and not (is_tiny(word) and is_tiny(got_word)):
                return math.inf
        worst = max(worst, off / most)
    return worst


def traced(path):
    """Cases, and the labels of their shaders."""
    if path.is_dir():
        cases = [json.loads(file.read_text()) for file in sorted(path.glob("*.json"))]
        return cases, {label for case in cases for label in case["shaders"]}
    trace = json.loads(path.read_text())
    return trace["cases"], set(trace["shaders"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("trace", type=pathlib.Path)
    parser.add_argument("shaders", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--simdgroup", type=int, default=32)
    parser.add_argument("--repeat", action="store_true")
    args = parser.parse_args()
    if args.repeat:
        return repeat(args)
    cases, labels = traced(args.trace)
    kernels = compiled(args.shaders, sorted(labels), args.folder, args.simdgroup)
    ran, failed, worst = set(), False, 0.0
    for case in cases:
        memory = run(case, kernels)
        off = off_device(case, memory) if "after" in case else off_oracle(case, memory)
        stages = sorted({d["shader"] for d in case["dispatches"]})
        worst = max(worst, off)
        if not off <= case.get("tolerance", TOLERANCE):
            failed = True
            print(f"{case['tier']}, {' '.join(stages)}: off by {off:.1e}", file=sys.stderr)
        ran |= {(case["tier"], stage.split("[")[0]) for stage in stages}
    print(f"{len(cases)} cases of {len(labels)} variants, off by {worst:.1e} at most", file=sys.stderr)
    if failed or not cases:
        sys.exit(1)
    for tier, stage in sorted(ran):
        print(tier, stage)


main()
