#!/usr/bin/env python3
"""Compile every Triton kernel for GPUs that are not here, and show what it takes of them.

Each kernel is compiled in each launch configuration that the package uses, by the functions that the
package launches with. The table has registers, stack, shared memory and spills: for NVIDIA as cuobjdump,
which comes with Triton, reads them out of the binary, for AMD as the assembly states them. A kernel that
spills registers or uses a stack is an error, and the exit status is 1 then.

On two cores the whole takes about a minute; what was compiled before comes from Triton's cache.

Examples
--------
::

    python scripts/compile_kernels.py                            # all targets
    python scripts/compile_kernels.py --target sm_90 gfx942
    python scripts/compile_kernels.py --widths 2 64 --json       # narrowest and widest, for a program
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmark"))

from lab.remote import end_on_signals

TARGETS: Final = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
WIDTHS: Final = (2, 4, 8, 16, 32, 64)
"""Tokens of a request, or nodes of a tree, as kernels are compiled for them: powers of two."""

LOGITS: Final = ("fp32", "fp16", "bf16")

# Types of arguments; all others are integers of 32 bits. Tokens have the 64 bits that torch gives them.
TYPES: Final = {
    "index": "*i32",
    "packed": "*i32",
    "headers": "*i32",
    "page_table": "*i32",
    "stored": "*i32",
    "metas": "*i32",
    "biases": "*fp32",
    "draft_entries": "*i32",
    "tokens": "*i64",
    "lens": "*i64",
    "ancestors": "*u8",
    "parents": "*i64",
    "mask": "*i8",
}


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes.

    Attributes
    ----------
    registers : int
        32-bit registers of a thread (NVIDIA), or vector registers of a lane (AMD).
    stack : int
        Bytes of memory of a thread, for a stack or spilled registers.
    shared : int
        Bytes of shared memory of a program.
    spills : int
        Bytes (NVIDIA) or registers (AMD) that are spilled.
    """

    registers: int
    stack: int
    shared: int
    spills: int

    @property
    def is_clean(self) -> bool:
        """Whether all that a thread has is in registers."""
        return self.stack == 0 and self.spills == 0


@dataclass(frozen=True)
class Case:
    """A kernel in one configuration."""

    kernel: Any
    name: str
    types: dict[str, str]
    launch: Any

    def signature(self) -> dict[str, str]:
        """Type of each argument, as Triton writes them."""
        types = TYPES | self.types | dict.fromkeys(self.launch.constants, "constexpr")
        return {name: types.get(name, "i32") for name in self.kernel.arg_names}


def cases(widths: Sequence[int] = WIDTHS) -> Iterator[Case]:
    """Every kernel in every configuration, for tokens and nodes up to each of `widths`."""
    from sglang.srt.sampling.penaltylib.triton_ops import sparse_penalties as ops

    yield Case(ops.update_kernel, "update", {}, ops.update_launch())
    yield Case(ops.ingest_kernel, "commit 1", {}, ops.ingest_launch(1, False, True))
    for width in widths:
        yield Case(
            ops.ingest_kernel, f"commit {width} lens", {}, ops.ingest_launch(width, True, True)
        )
        yield Case(ops.ingest_kernel, f"stage {width}", {}, ops.ingest_launch(width, False, False))
    for dtype in LOGITS:
        types = {"logits": f"*{dtype}"}
        yield Case(ops.apply_kernel, f"apply {dtype}", types, ops.apply_launch(None))
        for width in widths:
            name = f"apply tree {width} {dtype}"
            yield Case(ops.apply_kernel, name, types, ops.apply_launch(width))
    for width in widths:
        yield Case(ops.ancestors_kernel, f"ancestors {width}", {}, ops.ancestors_launch(width))


def compile_case(case: Case, target: str) -> Usage:
    """Compile a kernel and read what it takes.

    Raises
    ------
    RuntimeError
        If the binary's figures cannot be read.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = case.signature()
    # torch's tensors begin at multiples of 16 bytes, and the launcher tells the compiler so, but of
    # arguments that may be parts of tensors. Integers that are 1 or such a multiple it would tell of
    # too; those that change from step to step are exempt, and the rest are an engine's constants.
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, param in enumerate(case.kernel.params)
        if signature[param.name].startswith("*") and not param.do_not_specialize_on_alignment
    }
    source = ASTSource(
        fn=case.kernel, signature=signature, constexprs=case.launch.constants, attrs=attrs
    )
    options = {"num_warps": case.launch.num_warps, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)
    if "cubin" in compiled.asm:
        text = _cuobjdump(compiled.asm["cubin"])
        return parse_cuobjdump(text, compiled.metadata.shared)
    return parse_amdgcn(compiled.asm["amdgcn"], compiled.metadata.shared)


def _cuobjdump(cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    return done.stdout + done.stderr


def parse_cuobjdump(text: str, shared: int) -> Usage:
    """Read ``cuobjdump -res-usage``; `shared` is the memory that a launch asks for besides.

    LOCAL is what ptxas has put into memory: spills, since Triton has no arrays of a thread.
    """
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    if found is None:
        raise RuntimeError(f"no resource usage in what cuobjdump says: {text[-300:]!r}")
    registers, stack, _, local = map(int, found.groups())
    return Usage(registers, stack, shared, local)


def parse_amdgcn(assembly: str, shared: int) -> Usage:
    """Read the metadata at the end of AMD's assembly."""
    values = {}
    for key in (
        "vgpr_count",
        "private_segment_fixed_size",
        "vgpr_spill_count",
        "sgpr_spill_count",
    ):
        found = re.search(rf"^\s*\.{key}:\s*(\d+)", assembly, re.MULTILINE)
        if found is None:
            raise RuntimeError(f"no .{key} in the assembly")
        values[key] = int(found.group(1))
    return Usage(
        registers=values["vgpr_count"],
        stack=values["private_segment_fixed_size"],
        shared=shared,
        spills=values["vgpr_spill_count"] + values["sgpr_spill_count"],
    )


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--widths", nargs="+", type=int, choices=WIDTHS, default=list(WIDTHS))
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    args = _parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("TRITON_INTERPRET is set: an interpreted kernel cannot be compiled", file=sys.stderr)
        return 2
    rows = []
    row_format = "{:<24} {:<8} {:>5} {:>9} {:>6} {:>7} {:>6}"
    if not args.json:
        print(
            row_format.format("kernel", "target", "warps", "registers", "stack", "shared", "spills")
        )
    for case in cases(args.widths):
        for target in args.target:
            usage = compile_case(case, target)
            rows.append({"kernel": case.name, "target": target, **asdict(usage)})
            if not args.json:
                mark = "" if usage.is_clean else "  <- not in registers"
                figures = (usage.registers, usage.stack, usage.shared, usage.spills)
                line = row_format.format(case.name, target, case.launch.num_warps, *figures)
                print(line + mark, flush=True)
    if args.json:
        print(json.dumps(rows, indent=1))
    dirty = [row for row in rows if row["stack"] or row["spills"]]
    if not args.json:
        print(f"{len(rows)} compiled, {len(dirty)} with spills or stack")
    return 1 if dirty else 0


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
