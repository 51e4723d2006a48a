"""What goes between the engine's callers and the scheduler's thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang.srt.managers.schedule_batch import BaseFinishReason, ReqLogprobs
from sglang.srt.sampling.sampling_params import SamplingParams


@dataclass
class TokenizedGenerateReqInput:
    """A request at the scheduler's door. Fields as in `Req`.

    `is_checked` says that `Scheduler.check_request` has been asked already, and that the parameters know
    the tokenizer. Nobody else may change what a request holds.
    """

    rid: str
    input_ids: list[int]
    sampling_params: SamplingParams
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    return_hidden_states: bool = False
    is_checked: bool = False


@dataclass
class AbortReq:
    """Give up the request `rid`, or every request if it is None."""

    rid: str | None


@dataclass
class BatchTokenIDOutput:
    """New results of one request.

    Attributes
    ----------
    rid : str
    output_ids : list of int
        All output tokens so far.
    finished_reason : BaseFinishReason or None
        Set with the last result.
    logprobs : ReqLogprobs or None
    hidden_states : list or None
    meta : dict
        Counts for ``meta_info``.
    """

    rid: str
    output_ids: list[int]
    finished_reason: BaseFinishReason | None
    logprobs: ReqLogprobs | None
    hidden_states: list | None
    meta: dict[str, Any]
