#!/usr/bin/env python3
"""Repeats a traced layer on CPU threads, with the MSL that naga wrote for it and a stand-in for Apple's library.

usage: replay.py TRACE SHADERS FOLDER [--simdgroup N]

TRACE is what tests/trace.rs writes, SHADERS what tests/translate leaves. FOLDER takes the compiled kernels. Prints the
kernels that ran, one a line as `tier stage`, after every case has matched the oracle; ends with 1 where one has not.
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
    msl = path.read_text()
    threads, arguments = signature(msl)
    sizes = re.findall(r"uint size(\d+);", msl)
    shared = [(k.removeprefix("threadgroup").strip(), n) for k, n, a in arguments if k.startswith("threadgroup")]
    fill = " ".join(f"buffer_sizes.size{n} = sizes[{n}];" for n in sizes)
    declared = f"_mslBufferSizes buffer_sizes{{}}; {fill}" if sizes else ""
    locals_ = " ".join(f"static {kind} shared_{name};" for kind, name in shared)
    call = ", ".join(argument(*a) for a in arguments)
    return f"""namespace shader_{number} {{
#include "{path.resolve()}"
extern "C" void run_{number}(const uint32_t* grid, void* const* buffers, const uint32_t* sizes) {{
    {declared} {locals_}
    for (uint z = 0; z < grid[2]; z++) for (uint y = 0; y < grid[1]; y++) for (uint x = 0; x < grid[0]; x++) {{
        metal::uint3 workgroup(x, y, z);
        metal::run_threadgroup({threads}, SIMDGROUP, [&](uint lane) {{ main_({call}); }});
    }}
}}
}}
"""


def compiled(shaders, labels, folder, simdgroup):
    """The kernels of these labels, as a loaded library and their numbers."""
    table = [line.split("\t") for line in (shaders / "variants.tsv").read_text().splitlines()]
    numbers = {label: number for number, _, _, label in table}
    source = ["#include <metal_stdlib>\n"]
    for label in labels:
        source.append(wrapper(numbers[label], shaders / "metal" / f"{numbers[label]}.checked.metal"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernels.cpp").write_text("".join(source))
    library = folder / f"kernels-{simdgroup}.so"
    command = ["clang++-16", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", f"-DSIMDGROUP={simdgroup}"]
    subprocess.run([*command, f"-I{HERE / 'shim'}", folder / "kernels.cpp", "-o", library], check=True)
    return ctypes.CDLL(str(library.resolve())), numbers


def content(buffer):
    """The bytes that a buffer starts with."""
    if "fill" in buffer:
        return bytearray(bytes.fromhex(buffer["fill"]) * (buffer["size"] // 4))
    return bytearray(bytes.fromhex(buffer["bytes"]))


def run(case, library, numbers):
    """Largest difference over the largest expected value."""
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
        kernel = getattr(library, f"run_{numbers[dispatch['shader']]}")
        kernel((ctypes.c_uint32 * 3)(*grid), (ctypes.c_void_p * len(buffers))(*buffers), (ctypes.c_uint32 * len(sizes))(*sizes))
    expected = case["expected"]
    got = struct.unpack_from(f"<{len(expected)}f", memory[case["out"]], 0)
    (status,) = struct.unpack_from("<I", memory[case["status"]], 0)
    if status != case["expected_status"]:
        return math.inf
    off = max(abs(g - e) if g == g else math.inf for g, e in zip(got, expected))
    return off / max(abs(e) for e in expected)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("trace", type=pathlib.Path)
    parser.add_argument("shaders", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--simdgroup", type=int, default=32)
    args = parser.parse_args()
    trace = json.loads(args.trace.read_text())
    library, numbers = compiled(args.shaders, sorted(trace["shaders"]), args.folder, args.simdgroup)
    ran, failed = set(), False
    for case in trace["cases"]:
        off = run(case, library, numbers)
        failed |= not off <= case["tolerance"]
        name = f"{case['tier']}, {case['tokens']} tokens, {case['experts']} experts"
        print(f"{name}: off by {off:.1e} of at most {case['tolerance']:.0e}", file=sys.stderr)
        ran |= {(case["tier"], d["shader"].split("[")[0]) for d in case["dispatches"]}
    if failed:
        sys.exit(1)
    for tier, stage in sorted(ran):
        print(tier, stage)


main()
