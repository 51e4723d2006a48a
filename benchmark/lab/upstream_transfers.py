"""What real SGLang copies to prepare a batch with all penalties: ``python -m lab.upstream_transfers``.

For an interpreter as `lab.upstream` wants it. Prints JSON: what `TransferLedger.as_dict` tells of
``build`` (the sampling parameters of a batch), ``bias`` (of one with logit bias), ``decode`` (a plain
decode step), ``spec_decode`` (a speculative one) and ``apply`` (penalizing logits). The kernel that
enters KV slots into the request pool is left out: it is compiled, and no copy.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from lab import fake_device, upstream
from lab.audit_transfers import PENALTIES
from lab.transfer_ledger import TransferLedger
from lab.upstream_proofs import SPECULATION

ALL_PENALTIES = PENALTIES["all"] | {"stop_token_ids": [5, 7]}
SIZE = 4


def watched(act: Callable[[], Any]) -> dict[str, Any]:
    """What the fake device's ledger sees of `act`."""
    with TransferLedger(fake_device.NAME) as ledger, upstream.a_gpu():
        act()
    return ledger.as_dict()


def build() -> dict[str, Any]:
    """Building the sampling parameters of a batch whose requests have all penalties."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    batch = _batch()
    return watched(lambda: SamplingBatchInfo.from_schedule_batch(batch, upstream.VOCAB_SIZE))


def bias() -> dict[str, Any]:
    """The same of requests that have two entries of logit bias each, and no penalty."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    batch = _batch({"logit_bias": {"5": 1.0, "9": -2.0}})
    return watched(lambda: SamplingBatchInfo.from_schedule_batch(batch, upstream.VOCAB_SIZE))


def decode() -> dict[str, Any]:
    """A decode step's preparation."""
    batch = _batch()
    upstream.sampled(batch)
    return watched(batch.prepare_for_decode)


def apply() -> dict[str, Any]:
    """Penalizing the logits of a step."""
    batch = _batch()
    logits = torch.zeros((SIZE, upstream.VOCAB_SIZE), device=batch.device)
    return watched(lambda: batch.sampling_info.penalizer_orchestrator.apply(logits))


def spec_decode() -> dict[str, Any]:
    """A speculative decode step's preparation."""
    batch = _batch(**SPECULATION)
    with fake_device.FakeDeviceMode():
        upstream.begin_speculation(batch, SPECULATION["speculative_num_draft_tokens"])
    with upstream.slot_writer(lambda *args: None):
        return watched(batch.prepare_for_decode)


def _batch(params: dict[str, Any] = ALL_PENALTIES, **settings: Any) -> Any:
    with fake_device.FakeDeviceMode():
        return upstream.schedule_batch(SIZE, str(fake_device.device()), params, **settings)


def main() -> None:
    """Print everything as JSON."""
    upstream.stub_what_is_absent()
    try:
        upstream.import_release()
    except ImportError as error:
        sys.exit(
            f"upstream_transfers: error: {error}. This wants a release of SGLang on the path, and an "
            "interpreter that has what it imports: see docs/laboratory.md"
        )
    with torch.inference_mode(False), torch.no_grad():
        acts = (build, bias, decode, spec_decode, apply)
        print(json.dumps({act.__name__: act() for act in acts}, indent=2))


if __name__ == "__main__":
    main()
