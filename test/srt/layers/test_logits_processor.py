"""Which rows get logits, and that input logprobs of all chunks joined are those of the prompt."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.layers.logits_processor import (
    LogitsProcessor,
    LogitsProcessorOutput,
    TokenLogprobs,
    compute_token_logprobs,
)
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.utils.common import Platform, register_platform

VOCAB, HIDDEN = 23, 6
LOWEST = torch.finfo(torch.float32).min


@pytest.fixture(autouse=True)
def _one_thread():
    """Many small operations: threads would wait for each other, on a busy machine for long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Head:
    """A model that is only an lm_head, and remembers how many rows it was asked for."""

    def __init__(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(0)
        self.weight = (torch.randn(VOCAB, HIDDEN, generator=generator) * 2).to(device, dtype)
        self.calls: list[int] = []

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(hidden_states))
        return hidden_states @ self.weight.T

    def logprobs(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(hidden_states.double() @ self.weight.T.double(), dim=-1)


def make_batch(mode: ForwardMode, batch_size: int, device: str = "cpu", **fields) -> ForwardBatch:
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return ForwardBatch(
        forward_mode=mode,
        batch_size=batch_size,
        input_ids=nothing,
        positions=nothing,
        out_cache_loc=nothing,
        req_pool_indices=nothing,
        seq_lens=nothing,
        kv_indices=nothing,
        seq_lens_cpu=[0] * batch_size,
        **fields,
    )


def hidden_of(num_tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED])
@pytest.mark.parametrize("lens", [[3], [1, 1], [4, 1, 2]])
def test_ragged_modes_give_the_last_row_of_each_request(mode: ForwardMode, lens: list[int]) -> None:
    hidden, head = hidden_of(sum(lens)), Head()
    output = LogitsProcessor().forward(
        hidden, head, make_batch(mode, len(lens), extend_seq_lens_cpu=lens)
    )
    last = torch.tensor(lens).cumsum(0) - 1
    torch.testing.assert_close(output.next_token_logits, hidden[last] @ head.weight.T)
    assert head.calls == [len(lens)]
    assert output.hidden_states is None


@pytest.mark.parametrize(
    "mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2]
)
def test_other_modes_give_all_rows(mode: ForwardMode) -> None:
    hidden, head = hidden_of(6), Head()
    batch = make_batch(
        mode, 3, return_logprob=True, top_logprobs_nums=[0] * 3, token_ids_logprobs=[None] * 3
    )
    output = LogitsProcessor().forward(hidden, head, batch)
    torch.testing.assert_close(output.next_token_logits, hidden @ head.weight.T)
    assert output.input_token_logprobs is None and output.input_logprob_lens == [0] * 3


def test_a_batch_may_name_the_rows() -> None:
    hidden, head = hidden_of(6), Head()
    rows = torch.tensor([4, 1, 1])
    batch = make_batch(
        ForwardMode.DRAFT_EXTEND_V2,
        3,
        logits_rows=rows,
        capture_hidden_mode=CaptureHiddenMode.LAST,
    )
    output = LogitsProcessor().forward(hidden, head, batch)
    torch.testing.assert_close(output.next_token_logits, (hidden @ head.weight.T)[rows])
    assert head.calls == [3]
    assert torch.equal(output.hidden_states, hidden[rows])


def test_no_tokens_at_all() -> None:
    output = LogitsProcessor().forward(hidden_of(0), Head(), make_batch(ForwardMode.IDLE, 0))
    assert output.next_token_logits.shape == (0, VOCAB)
    output.copy_to_host()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_float32(dtype: torch.dtype) -> None:
    hidden, head = hidden_of(3).to(dtype), Head(dtype)
    output = LogitsProcessor().forward(
        hidden, head, make_batch(ForwardMode.EXTEND, 1, extend_seq_lens_cpu=[3])
    )
    assert output.next_token_logits.dtype == torch.float32


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.DECODE])
def test_hidden_states_are_captured_as_asked(mode: ForwardMode) -> None:
    hidden = hidden_of(4)
    rows = [2, 3] if mode == ForwardMode.EXTEND else [0, 1, 2, 3]
    for capture, expected in (
        (CaptureHiddenMode.NULL, None),
        (CaptureHiddenMode.LAST, hidden[rows]),
        (CaptureHiddenMode.FULL, hidden),
    ):
        for wanted in (False, True):
            batch = make_batch(
                mode,
                2,
                extend_seq_lens_cpu=[3, 1],
                capture_hidden_mode=capture,
                return_hidden_states=wanted,
            )
            output = LogitsProcessor().forward(hidden, Head(), batch)
            if expected is None:
                assert output.hidden_states is None
                continue
            assert torch.equal(output.hidden_states, expected)
            output.copy_to_host()  # only requests read them on the host
            assert (output.hidden_states is not None) is wanted
            assert output.next_token_logits is None


# --- Input logprobs ---------------------------------------------------------------------------


def test_the_example_of_the_docstring() -> None:
    prompt, head = [10, 11, 12, 13, 14], Head()
    hidden = hidden_of(5)
    exact = head.logprobs(hidden)
    joined = []
    for p, n, s, ids in ((0, 2, 1, [12]), (2, 2, 0, [13, 14]), (4, 1, 0, [0])):
        batch = make_batch(
            ForwardMode.EXTEND,
            1,
            extend_seq_lens_cpu=[n],
            extend_logprob_start_lens_cpu=[s],
            extend_input_logprob_token_ids=torch.tensor(ids),
            return_logprob=True,
            top_logprobs_nums=[0],
            token_ids_logprobs=[None],
        )
        output = LogitsProcessor().forward(hidden[p : p + n], head, batch)
        joined += output.input_logprobs(0).token
    expected = [exact[i - 1, prompt[i]].item() for i in (2, 3, 4)]
    assert joined[:-1] == pytest.approx(expected, abs=1e-5)


class Scored:
    """A request that wants input logprobs, and how a scheduler feeds and reads it."""

    def __init__(self, prompt: list[int], start: int, top: int, ids: list[int] | None, seed: int):
        self.prompt, self.start, self.top, self.ids = prompt, start, top, ids
        self.hidden = hidden_of(len(prompt), seed)
        self.prefix = 0
        self.token: list[float] = []
        self.top_rows: list[tuple[list[float], list[int]]] = []
        self.id_rows: list[tuple[list[float], list[int]]] = []

    def chunk(self, n: int) -> tuple[int, int, list[int], torch.Tensor]:
        p = self.prefix
        n = min(n, len(self.prompt) - p)
        s = min(max(self.start, p) - p, n)
        ids = self.prompt[p + s + 1 : p + n + 1]
        ids += [0] * (n - s - len(ids))
        self.prefix += n
        return n, s, ids, self.hidden[p : p + n]

    def read(self, output: LogitsProcessorOutput, i: int) -> None:
        rows = output.input_logprobs(i)
        assert len(rows.token) == output.input_logprob_lens[i]
        self.token += rows.token
        if self.top:
            self.top_rows += zip(rows.top_val, rows.top_idx, strict=True)
        else:
            assert rows.top_val is None and rows.top_idx is None
        if self.ids is not None:
            self.id_rows += zip(rows.token_ids_val, rows.token_ids_idx, strict=True)
        else:
            assert rows.token_ids_val is None and rows.token_ids_idx is None

    def check(self, head: Head) -> None:
        """Every token of prompt[start:] but the first has one entry, once the filler is dropped."""
        exact = head.logprobs(self.hidden)
        positions = range(self.start + 1, len(self.prompt))
        expected = [exact[i - 1, self.prompt[i]].item() for i in positions]
        assert self.token[:-1] == pytest.approx(expected, abs=1e-5)
        if self.top:
            best = exact.topk(self.top)
            assert len(self.top_rows) == len(self.token)
            for (val, idx), i in zip(self.top_rows[:-1], positions, strict=True):
                assert idx == best.indices[i - 1].tolist()
                assert val == pytest.approx(best.values[i - 1].tolist(), abs=1e-5)
        if self.ids is not None:
            assert len(self.id_rows) == len(self.token)
            for (val, idx), i in zip(self.id_rows[:-1], positions, strict=True):
                assert idx == self.ids
                assert val == pytest.approx(exact[i - 1, self.ids].tolist(), abs=1e-5)


tokens = st.integers(0, VOCAB - 1)


@st.composite
def scored_requests(draw: st.DrawFn) -> Scored:
    prompt = draw(st.lists(tokens, min_size=1, max_size=12))
    return Scored(
        prompt,
        # At the end of the prompt no position is asked for.
        start=draw(st.integers(0, len(prompt))),
        top=draw(st.sampled_from([0, 0, 1, 3])),
        ids=draw(st.one_of(st.none(), st.lists(tokens, max_size=3))),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=80, deadline=None)
@given(
    reqs=st.lists(scored_requests(), min_size=1, max_size=4),
    data=st.data(),
    rows_at_once=st.sampled_from([0, 1, 2, 3, 100]),
)
def test_chunks_joined_are_the_prompt(
    reqs: list[Scored], data: st.DataObject, rows_at_once: int
) -> None:
    """However prompts are cut into forwards, and forwards into parts; decoding requests beside them."""
    head = Head()
    processor = LogitsProcessor(max_logits=rows_at_once * VOCAB)
    waiting = list(reqs)
    while waiting:
        batch_reqs = data.draw(st.permutations(waiting))[: data.draw(st.integers(1, 4))]
        chunks = [req.chunk(data.draw(st.integers(1, 6))) for req in batch_reqs]
        decoding = data.draw(st.integers(0, 2))
        chunks += [(1, 1, [], hidden_of(1, 7))] * decoding
        n, s, ids, hidden = zip(*chunks, strict=True)
        flat_ids = [t for part in ids for t in part]
        batch = make_batch(
            ForwardMode.MIXED if decoding else ForwardMode.EXTEND,
            len(chunks),
            extend_seq_lens_cpu=list(n),
            extend_logprob_start_lens_cpu=list(s),
            extend_input_logprob_token_ids=torch.tensor(flat_ids, dtype=torch.int64),
            return_logprob=True,
            top_logprobs_nums=[r.top for r in batch_reqs] + [2] * decoding,
            token_ids_logprobs=[r.ids for r in batch_reqs] + [None] * decoding,
        )
        head.calls.clear()
        output = processor.forward(torch.cat(hidden), head, batch)
        assert max(head.calls[1:], default=0) <= max(1, rows_at_once)
        assert sum(head.calls[1:]) == len(flat_ids)
        output.copy_to_host()
        for i, req in enumerate(batch_reqs):
            req.read(output, i)
        for i in range(len(batch_reqs), len(chunks)):
            assert output.input_logprobs(i).token == []
        waiting = [req for req in waiting if req.prefix < len(req.prompt)]
    for req in reqs:
        if req.start < len(req.prompt):
            req.check(head)
        else:
            assert req.token == []


def test_asking_for_logprobs_does_not_change_the_logits() -> None:
    """Sampled rows are computed by themselves, in the same shape with and without."""
    hidden, head = hidden_of(7), Head()
    fields = {"extend_seq_lens_cpu": [4, 3]}
    plain = LogitsProcessor().forward(hidden, head, make_batch(ForwardMode.EXTEND, 2, **fields))
    scored = LogitsProcessor().forward(
        hidden,
        head,
        make_batch(
            ForwardMode.EXTEND,
            2,
            **fields,
            extend_logprob_start_lens_cpu=[0, 2],
            extend_input_logprob_token_ids=torch.arange(5),
            return_logprob=True,
            top_logprobs_nums=[1, 0],
            token_ids_logprobs=[None, [3]],
        ),
    )
    assert torch.equal(plain.next_token_logits, scored.next_token_logits)
    assert scored.input_logprob_lens == [4, 1]


def test_nobody_asked_for_input_positions() -> None:
    batch = make_batch(
        ForwardMode.EXTEND,
        2,
        extend_seq_lens_cpu=[2, 1],
        extend_logprob_start_lens_cpu=[2, 1],
        return_logprob=True,
        top_logprobs_nums=[5, 0],
        token_ids_logprobs=[None, [1]],
    )
    head = Head()
    output = LogitsProcessor().forward(hidden_of(3), head, batch)
    assert head.calls == [2]
    assert output.input_token_logprobs is None and output.input_logprob_lens == [0, 0]
    assert output.input_logprobs(0) == ([], [], [], None, None)
    assert output.input_logprobs(1) == ([], None, None, [], [])


def test_wrong_lengths_are_refused() -> None:
    def run(s: int, ids: torch.Tensor | None) -> None:
        batch = make_batch(
            ForwardMode.EXTEND,
            1,
            extend_seq_lens_cpu=[3],
            extend_logprob_start_lens_cpu=[s],
            extend_input_logprob_token_ids=ids,
            return_logprob=True,
            top_logprobs_nums=[0],
            token_ids_logprobs=[None],
        )
        LogitsProcessor().forward(hidden_of(3), Head(), batch)

    run(1, torch.tensor([1, 2]))
    for s, ids in ((1, torch.tensor([1])), (1, None), (0, torch.tensor([1, 2]))):
        with pytest.raises(ValueError, match="extend_input_logprob_token_ids"):
            run(s, ids)
    for s in (-1, 4):
        with pytest.raises(ValueError, match="extend_logprob_start_lens_cpu"):
            run(s, torch.tensor([1, 2]))


# --- Logprobs of given rows -------------------------------------------------------------------


def test_compute_token_logprobs_with_several_rows_of_a_request() -> None:
    """The form that speculation uses: R rows for each request, and one more dimension."""
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    logits[0, 4] = -torch.inf
    token_ids = torch.tensor([4, 1, 2, 3, 4, 5])
    temperatures = torch.tensor([0.5, 0.5, 0.5, 2.0, 2.0, 2.0]).unsqueeze(1)
    exact = torch.log_softmax(logits.double() / temperatures.double(), dim=-1).clamp(min=LOWEST)
    nums, ids = [0, 2], [[4, 7, 1], None]
    result = compute_token_logprobs(logits, token_ids, nums, ids, [3, 3], temperatures)
    output = LogitsProcessorOutput(None)
    output.set_next_token_logprobs(result, nums, ids, rows_per_request=3)
    assert output.next_token_logprobs.shape == (2, 3)
    assert output.next_token_top_logprobs_val.shape == (2, 3, 2)
    assert output.next_token_token_ids_logprobs_val.shape == (2, 3, 3)
    output.copy_to_host()
    for count in (1, 2, 3):
        first, second = output.output_logprobs(0, count), output.output_logprobs(1, count)
        rows = torch.arange(count)
        assert first.token == pytest.approx(
            exact[rows, token_ids[:count]].tolist(), rel=1e-5, abs=1e-6
        )
        assert second.token == pytest.approx(
            exact[rows + 3, token_ids[3 : 3 + count]].tolist(), rel=1e-5, abs=1e-6
        )
        assert first.top_val is None and second.token_ids_val is None
        assert second.top_idx == exact[3 : 3 + count].topk(2).indices.tolist()
        assert first.token_ids_idx == [[4, 7, 1]] * count
        for row in range(count):
            assert first.token_ids_val[row] == pytest.approx(
                exact[row, [4, 7, 1]].tolist(), rel=1e-5, abs=1e-6
            )


def test_more_candidates_than_tokens() -> None:
    logits = torch.zeros(1, 3)
    result = compute_token_logprobs(logits, torch.tensor([0]), [10], [None])
    assert result.top_val.shape == (1, 3)


def test_joining_nothing_but_none() -> None:
    part = TokenLogprobs(torch.zeros(2))
    joined = TokenLogprobs.cat([part, part])
    assert joined.token.shape == (4,)
    assert joined.top_val is joined.top_idx is joined.token_ids_val is None


def test_the_device_is_asked_for_nothing() -> None:
    """On a device without values, whoever asks for one gets an error instead of a wait."""
    previous = register_platform(Platform("meta", torch.device("meta")))
    try:
        hidden = torch.empty(7, HIDDEN, device="meta")
        batch = make_batch(
            ForwardMode.EXTEND,
            2,
            device="meta",
            extend_seq_lens_cpu=[4, 3],
            extend_logprob_start_lens_cpu=[1, 0],
            extend_input_logprob_token_ids=torch.empty(6, dtype=torch.int64, device="meta"),
            return_logprob=True,
            top_logprobs_nums=[0, 2],
            token_ids_logprobs=[[1, 2], None],
        )
        output = LogitsProcessor(max_logits=2 * VOCAB).forward(hidden, Head(device="meta"), batch)
        assert output.input_top_logprobs_val.shape == (6, 2)
        assert output.input_token_ids_logprobs_val.shape == (6, 2)
    finally:
        if previous is not None:
            register_platform(previous)
