"""An upstream-style fork of SGLang's decode path."""

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.sampling.sampling_params import SamplingParams

__all__ = ["Engine", "SamplingParams"]
