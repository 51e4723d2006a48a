"""scripts/compile_kernels.py: what it reads, that it misses no kernel, and real compilations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import compile_kernels
from compile_kernels import TARGETS, Usage, cases, main, parse_amdgcn, parse_cuobjdump

triton = pytest.importorskip("triton")

CUOBJDUMP = """
Fatbin elf code:
arch = sm_90
Resource usage:
 Common:
  GLOBAL:0
 Function apply_kernel:
  REG:46 STACK:{stack} SHARED:1024 LOCAL:{local} CONSTANT[0]:656 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
AMDGCN = """
  .vgpr_spill_count: 999 is no metadata here
amdhsa.kernels:
  - .agpr_count:     0
    .group_segment_fixed_size: 0
    .private_segment_fixed_size: {stack}
    .sgpr_count:     42
    .sgpr_spill_count: {sgprs}
    .vgpr_count:     34
    .vgpr_spill_count: {vgprs}
"""


def test_what_cuobjdump_says_is_read() -> None:
    usage = parse_cuobjdump(CUOBJDUMP.format(stack=0, local=0), shared=2048)
    assert usage == Usage(registers=46, stack=0, shared=2048, spills=0) and usage.is_clean
    assert not parse_cuobjdump(CUOBJDUMP.format(stack=8, local=0), 0).is_clean
    assert parse_cuobjdump(CUOBJDUMP.format(stack=0, local=4), 0).spills == 4
    with pytest.raises(RuntimeError, match="no resource usage"):
        parse_cuobjdump("cuobjdump fatal", 0)


def test_what_the_assembly_says_is_read() -> None:
    text = AMDGCN.replace("  .vgpr_spill_count: 999 is no metadata here\n", "")
    usage = parse_amdgcn(text.format(stack=0, sgprs=0, vgprs=0), shared=512)
    assert usage == Usage(registers=34, stack=0, shared=512, spills=0) and usage.is_clean
    assert parse_amdgcn(text.format(stack=0, sgprs=44, vgprs=2), 0).spills == 46
    assert not parse_amdgcn(text.format(stack=16, sgprs=0, vgprs=0), 0).is_clean
    with pytest.raises(RuntimeError, match="sgpr_spill_count"):
        parse_amdgcn(text.replace(".sgpr_spill_count", ".x").format(stack=0, sgprs=0, vgprs=0), 0)


def test_every_kernel_and_every_argument_is_covered() -> None:
    from sglang.srt.sampling.penaltylib.triton_ops import sparse_penalties as ops

    kernels = {name for name in vars(ops) if name.endswith("_kernel")}
    covered = {case.kernel.__name__ for case in cases()}
    assert covered == kernels
    for case in cases():
        signature = case.signature()
        assert list(signature) == case.kernel.arg_names
        assert set(case.launch.constants) == {k for k, v in signature.items() if v == "constexpr"}
        assert case.launch.constants.keys() <= set(case.kernel.arg_names)
    names = [case.name for case in cases()]
    assert len(names) == len(set(names)) == 41


def test_every_package_with_kernels_is_known() -> None:
    """A new file of kernels has to be told to the tool."""
    package = Path(compile_kernels.__file__).parents[1] / "python" / "sglang"
    found = [p.name for p in package.rglob("*.py") if "@triton.jit" in p.read_text("utf-8")]
    assert found == ["sparse_penalties.py"]


def test_a_spill_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usages = iter([Usage(32, 0, 0, 0)] * 5 + [Usage(255, 8, 0, 8)] + [Usage(32, 0, 0, 0)] * 99)
    monkeypatch.setattr(compile_kernels, "compile_case", lambda *_: next(usages))
    assert main(["--target", "sm_90", "--widths", "2"]) == 1
    out = capsys.readouterr().out
    assert out.count("<- not in registers") == 1 and "1 with spills or stack" in out


def test_no_compiling_in_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main([]) == 2
    assert "TRITON_INTERPRET" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_the_widest_kernels_stay_in_registers(
    target: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_kernels, "LOGITS", ("bf16",))
    assert main(["--target", target, "--widths", "8", "64", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 2 + 2 * 2 + 3 + 2
    assert all(row["target"] == target and row["registers"] > 0 for row in rows)
    assert not any(row["spills"] or row["stack"] for row in rows)
    assert any(row["shared"] for row in rows)


def test_targets_name_what_triton_knows() -> None:
    from triton.backends.compiler import GPUTarget

    for backend, arch, warp in TARGETS.values():
        assert GPUTarget(backend, arch, warp).backend in ("cuda", "hip")
