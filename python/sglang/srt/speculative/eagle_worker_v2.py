"""EAGLE speculative decoding: draft a tree, let the target judge it, take in what it kept.

Everything here runs inside one forward of the engine, on the forward stream. Nothing asks the
device for a value: the host learns the number of accepted tokens with the step's other results.

One decode step of a request with committed KV at the positions before ``s``::

    row position   0 .. s-1    s ..                              .. kv_allocated_len - 1
    draft          committed   level 1 | level 2 | ..            topk scratch slots a level
    verify         committed   root | node 1 | node 2 | ..       num_draft_tokens slots
    draft extend   committed   tokens of s+1, s+2, ..            num_steps + 1 slots

Draft and target have KV pools of their own with the same slots, so the draft's scratch and the
target's nodes do not meet. What lies behind the accepted tokens is overwritten by the next step.

Why the output is the target's: at each node of the tree the target's own token is drawn, by nothing
but the request's seed and the token's position (see `Sampler`), from logits that depend on nothing
but the node's path. Where the path is a beginning of what plain decoding would write, that token is
the one that plain decoding would write next. The root is such a path. A child is followed only if
it holds the token that was drawn at its parent, so by induction all nodes that are followed are
such paths, and the tokens drawn on the way are those of plain decoding. The draft decides how many
of them a step yields, and nothing else. So the distribution is exactly the target's, greedy or
sampled, and with equal seeds the text is equal too. Both hold up to the rounding of logits that are
computed in batches of another shape; and with dense penalties (``penalty_backend="dense"``) only as far
as one row of counts fits all nodes of a tree.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang.srt.layers.logits_processor import LogitsProcessorOutput, compute_token_logprobs
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.generation_result import GenerationBatchResult
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.eagle_info import EagleDraftInput, EagleVerifyInput
from sglang.srt.speculative.eagle_tree import (
    DraftCandidates,
    DraftTree,
    accept_path,
    beam_self_masks,
    expand_local_mask,
    max_num_draft_tokens,
    pad_local_mask,
    path_move_locs,
    visible_columns,
)
from sglang.srt.utils.common import to_device_async

if TYPE_CHECKING:
    from sglang.srt.managers.overlap_utils import FutureMap


class VerifyResult(NamedTuple):
    """What the target said about ``B`` draft trees.

    Attributes
    ----------
    logits_output : LogitsProcessorOutput
        Logprobs and hidden states that requests asked for, along the accepted paths.
    next_token_ids : Tensor, shape (B, num_steps + 1), int64
        The target's token behind each node of the path.
    accept_lens : Tensor, shape (B,), int64
        How many of them count.
    features : Tensor, shape (B * (num_steps + 1), hidden_size)
        The target's hidden states at the nodes of the path.
    """

    logits_output: LogitsProcessorOutput
    next_token_ids: torch.Tensor
    accept_lens: torch.Tensor
    features: torch.Tensor


class EAGLEWorkerV2:
    """Runs the batches of an engine that speculates.

    Parameters
    ----------
    server_args : ServerArgs
        Its ``speculative_num_steps``, ``speculative_eagle_topk`` and
        ``speculative_num_draft_tokens`` give the shape of the draft tree.
    target_runner, draft_runner : ModelRunner
        The draft model shares the target's embedding and head already.
    future_map : FutureMap
        Where the state of the requests is kept between steps.

    Raises
    ------
    ValueError
        If the tree cannot have that shape.
    """

    def __init__(
        self,
        server_args: ServerArgs,
        target_runner: ModelRunner,
        draft_runner: ModelRunner,
        future_map: FutureMap,
    ) -> None:
        self.num_steps = server_args.speculative_num_steps
        self.topk = server_args.speculative_eagle_topk
        self.num_draft_tokens = server_args.speculative_num_draft_tokens
        self.target_runner = target_runner
        self.draft_runner = draft_runner
        self.future_map = future_map
        self._check_tree()

        device = target_runner.device
        self._num_scratch = (self.num_steps - 1) * self.topk
        row_len = max(self._num_scratch, self.num_draft_tokens, self.num_steps + 1)
        self._row_offsets = torch.arange(row_len, device=device)
        self._beam_self_masks = beam_self_masks(self.num_steps, self.topk, device)

    def _check_tree(self) -> None:
        most = max_num_draft_tokens(self.num_steps, self.topk)
        if not 2 <= self.num_draft_tokens <= most:
            raise ValueError(
                f"speculative_num_draft_tokens must be in [2, {most}] with speculative_num_steps="
                f"{self.num_steps} and speculative_eagle_topk={self.topk}, "
                f"got {self.num_draft_tokens}"
            )
        vocab_size = self.draft_runner.model_config.draft_vocab_size
        vocab_size = vocab_size or self.draft_runner.model_config.vocab_size
        if self.topk > vocab_size:
            raise ValueError(
                "speculative_eagle_topk must be at most the draft model's vocabulary of "
                f"{vocab_size}, got {self.topk}"
            )

    def forward_batch_generation(self, forward_batch: ForwardBatch) -> GenerationBatchResult:
        """Run a prefill, or one step of draft and verification.

        Parameters
        ----------
        forward_batch : ForwardBatch
            Is not changed. In decode mode its ``kv_indices`` reach far enough behind the committed
            tokens for what one step writes.

        Returns
        -------
        GenerationBatchResult
            ``next_token_ids`` has shape (B,) for a prefill and (B, num_steps + 1) else, of which
            the first ``accept_lens`` count; ids behind them are valid and mean nothing.
        """
        if forward_batch.forward_mode.is_extend():
            return self._forward_extend(forward_batch)
        return self._forward_decode(forward_batch)

    # ---- prefill

    def _forward_extend(self, forward_batch: ForwardBatch) -> GenerationBatchResult:
        target_batch = replace(forward_batch, capture_hidden_mode=CaptureHiddenMode.FULL)
        logits_output = self.target_runner.forward(target_batch)
        features = logits_output.hidden_states
        if forward_batch.capture_hidden_mode != CaptureHiddenMode.FULL:
            logits_output.hidden_states = None
        next_token_ids = self.target_runner.sample(logits_output, forward_batch)
        return GenerationBatchResult(
            logits_output,
            next_token_ids,
            next_draft_input=self._draft_extend(forward_batch, features, next_token_ids),
        )

    def _draft_extend(
        self, forward_batch: ForwardBatch, features: torch.Tensor, next_token_ids: torch.Tensor
    ) -> EagleDraftInput:
        """Let the draft model take in a prefill: at each position the token behind it."""
        behind = forward_batch.spec_next_token_ids
        behind = torch.where(behind >= 0, behind, next_token_ids)
        ends = _ends(forward_batch.extend_seq_lens_cpu)
        ends = to_device_async(ends, torch.int64, features.device)
        draft_batch = replace(
            forward_batch,
            input_ids=forward_batch.input_ids.roll(-1).index_copy_(0, ends, behind),
            spec_hidden_states=features,
            capture_hidden_mode=CaptureHiddenMode.LAST,
            return_logprob=False,
            return_hidden_states=False,
        )
        output = self.draft_runner.forward(draft_batch)
        topk_p, topk_index = self._draft_topk(output.next_token_logits)
        return EagleDraftInput(
            verified_id=next_token_ids,
            new_seq_lens=forward_batch.seq_lens,
            topk_p=topk_p,
            topk_index=topk_index,
            hidden_states=output.hidden_states,
        )

    # ---- decode

    def _forward_decode(self, forward_batch: ForwardBatch) -> GenerationBatchResult:
        draft_input = self.future_map.resolve_spec(forward_batch.req_pool_indices)
        places = draft_input.new_seq_lens.unsqueeze(1) + self._row_offsets
        locs = forward_batch.kv_indices.gather(1, places)

        started = time.perf_counter()
        verify_input = self.draft(forward_batch, draft_input, locs)
        drafted = time.perf_counter()
        result = self.verify(forward_batch, verify_input, draft_input.new_seq_lens, locs)
        verified = time.perf_counter()
        next_draft_input = self._draft_extend_after_verify(
            forward_batch, result, draft_input.new_seq_lens, locs
        )
        # On a device that runs later what is launched now, these are the times of the launches.
        phases = {
            "draft": drafted - started,
            "verify": verified - drafted,
            "extend": time.perf_counter() - verified,
        }
        return GenerationBatchResult(
            result.logits_output,
            result.next_token_ids,
            accept_lens=result.accept_lens,
            next_draft_input=next_draft_input,
            phases=phases,
        )

    def draft(
        self, forward_batch: ForwardBatch, draft_input: EagleDraftInput, locs: torch.Tensor
    ) -> EagleVerifyInput:
        """Grow a tree for each request by ``num_steps - 1`` forwards of the draft model.

        Parameters
        ----------
        forward_batch : ForwardBatch
            The decode step.
        draft_input : EagleDraftInput
            Where the requests stand.
        locs : Tensor, shape (B, at least (num_steps - 1) * topk), int64
            KV slots of the row positions behind the committed ones.

        Returns
        -------
        EagleVerifyInput
        """
        batch_size, topk = draft_input.topk_p.shape
        seq_lens = draft_input.new_seq_lens
        candidates = DraftCandidates(
            draft_input.topk_p, draft_input.topk_index, self._beam_self_masks
        )
        features = draft_input.hidden_states.repeat_interleave(
            topk, dim=0, output_size=batch_size * topk
        )
        columns = self._columns(seq_lens, self._num_scratch, forward_batch)
        for step in range(self.num_steps - 1):
            draft_batch = self._tree_batch(
                forward_batch,
                ForwardMode.DECODE,
                input_ids=candidates.beam_tokens,
                positions=(seq_lens + step).unsqueeze(1).expand(-1, topk),
                locs=locs[:, step * topk : (step + 1) * topk],
                seq_lens=seq_lens,
                custom_mask=self._custom_mask(candidates.beam_mask, columns),
                spec_hidden_states=features,
            )
            output = self.draft_runner.forward(draft_batch)
            topk_p, topk_index = self._draft_topk(output.next_token_logits)
            shape = (batch_size, topk, topk)
            candidates.add_level(topk_p.view(shape), topk_index.view(shape))
            if step < self.num_steps - 2:
                parents = candidates.select_beam()
                features = _rows_of(output.hidden_states, parents)
        tree = candidates.build_tree(draft_input.verified_id, self.num_draft_tokens)
        return EagleVerifyInput.from_tree(tree, self.num_steps, topk)

    def verify(
        self,
        forward_batch: ForwardBatch,
        verify_input: EagleVerifyInput,
        seq_lens: torch.Tensor,
        locs: torch.Tensor,
    ) -> VerifyResult:
        """Draw the target's token at each node and follow the draft as far as it agrees.

        Parameters
        ----------
        forward_batch : ForwardBatch
            The decode step.
        verify_input : EagleVerifyInput
            The trees.
        seq_lens : Tensor, shape (B,), int64
            Committed tokens.
        locs : Tensor, shape (B, at least max(num_draft_tokens, num_steps + 1)), int64
            KV slots of the row positions behind them. In the end those of the accepted tokens hold
            the KV of the accepted path.

        Returns
        -------
        VerifyResult
        """
        tree = verify_input.tree
        positions = seq_lens.unsqueeze(1) + tree.depth
        node_locs = locs[:, : self.num_draft_tokens]
        columns = self._columns(seq_lens, self.num_draft_tokens, forward_batch)
        verify_batch = self._tree_batch(
            forward_batch,
            ForwardMode.TARGET_VERIFY,
            input_ids=tree.tokens,
            positions=positions,
            locs=node_locs,
            seq_lens=seq_lens,
            custom_mask=self._custom_mask(pad_local_mask(tree.ancestor_mask), columns),
            spec_info=verify_input,
        )
        output = self.target_runner.forward(verify_batch)
        target_tokens = self._sample_nodes(output, forward_batch, tree, positions + 1)
        path = accept_path(tree, target_tokens, self.num_steps)
        if self.topk > 1:
            tgt_loc, src_loc = path_move_locs(node_locs, locs[:, : self.num_steps + 1], path)
            self.target_runner.token_to_kv_pool.move_kv_cache(tgt_loc, src_loc)

        next_token_ids = target_tokens.gather(1, path.nodes)
        if (penalties := self.target_runner.penalty_state) is not None:
            penalties.commit(forward_batch.penalty_step, next_token_ids, path.accept_lens)
        features = _rows_of(output.hidden_states, path.nodes)
        return VerifyResult(
            logits_output=self._path_output(
                forward_batch, output, path.nodes, next_token_ids, features
            ),
            next_token_ids=next_token_ids,
            accept_lens=path.accept_lens,
            features=features,
        )

    def _sample_nodes(
        self,
        output: LogitsProcessorOutput,
        forward_batch: ForwardBatch,
        tree: DraftTree,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """The target's token behind each node, shape (B, D); its place is `positions`, (B, D)."""
        sampling_info = forward_batch.sampling_info
        logits = output.next_token_logits = output.next_token_logits.float()
        sampling_info.apply_logits_bias(logits, repeat=self.num_draft_tokens)
        if (penalties := self.target_runner.penalty_state) is not None:
            # At each node, its own token and those of its ancestors count as if they were output.
            penalties.stage(forward_batch.penalty_step, tree.tokens)
            penalties.apply(forward_batch.penalty_step, logits, tree.ancestor_mask)
        if not sampling_info.is_all_greedy:
            sampling_info = sampling_info.repeat(self.num_draft_tokens)
        tokens = self.target_runner.sampler.forward(
            output,
            sampling_info,
            return_logprob=False,
            top_logprobs_nums=None,
            token_ids_logprobs=None,
            positions=positions.flatten(),
        )
        return tokens.view_as(positions)

    def _path_output(
        self,
        forward_batch: ForwardBatch,
        output: LogitsProcessorOutput,
        nodes: torch.Tensor,
        next_token_ids: torch.Tensor,
        features: torch.Tensor,
    ) -> LogitsProcessorOutput:
        """What requests asked for, at the nodes of the accepted path."""
        batch_size, path_len = nodes.shape
        path_output = LogitsProcessorOutput(next_token_logits=None)
        if forward_batch.return_hidden_states:
            path_output.hidden_states = features.view(batch_size, path_len, -1)
            path_output.return_hidden_states = True
        if forward_batch.return_logprob:
            info = forward_batch.sampling_info
            logprobs = compute_token_logprobs(
                _rows_of(output.next_token_logits, nodes),
                next_token_ids.flatten(),
                forward_batch.top_logprobs_nums,
                forward_batch.token_ids_logprobs,
                row_counts=[path_len] * batch_size,
                temperatures=(None if info.is_all_greedy else info.repeat(path_len).temperatures),
            )
            path_output.set_next_token_logprobs(
                logprobs,
                forward_batch.top_logprobs_nums,
                forward_batch.token_ids_logprobs,
                rows_per_request=path_len,
            )
        return path_output

    def _draft_extend_after_verify(
        self,
        forward_batch: ForwardBatch,
        result: VerifyResult,
        seq_lens: torch.Tensor,
        locs: torch.Tensor,
    ) -> EagleDraftInput:
        """Let the draft model take in the accepted path, padded to ``num_steps + 1`` tokens.

        What it writes behind the path is not committed and will be overwritten.
        """
        path_len = self.num_steps + 1
        last = result.accept_lens.unsqueeze(1) - 1
        extend_batch = self._tree_batch(
            forward_batch,
            ForwardMode.DRAFT_EXTEND_V2,
            input_ids=result.next_token_ids,
            positions=seq_lens.unsqueeze(1) + self._row_offsets[:path_len],
            locs=locs[:, :path_len],
            seq_lens=seq_lens + path_len,
            spec_hidden_states=result.features,
        )
        # Only what stands behind the path's end is drafted from.
        extend_batch.logits_rows = _row_index(path_len, last)
        extend_batch.capture_hidden_mode = CaptureHiddenMode.LAST
        output = self.draft_runner.forward(extend_batch)
        topk_p, topk_index = self._draft_topk(output.next_token_logits)
        return EagleDraftInput(
            verified_id=result.next_token_ids.gather(1, last).squeeze(1),
            new_seq_lens=seq_lens + result.accept_lens,
            topk_p=topk_p,
            topk_index=topk_index,
            hidden_states=output.hidden_states,
        )

    # ---- parts

    def _tree_batch(
        self,
        forward_batch: ForwardBatch,
        forward_mode: ForwardMode,
        *,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        locs: torch.Tensor,
        seq_lens: torch.Tensor,
        custom_mask: torch.Tensor | None = None,
        spec_hidden_states: torch.Tensor | None = None,
        spec_info: EagleVerifyInput | None = None,
    ) -> ForwardBatch:
        """A forward of Q tokens for each request; ids, positions and slots have shape (B, Q)."""
        return ForwardBatch(
            forward_mode=forward_mode,
            batch_size=forward_batch.batch_size,
            input_ids=input_ids.flatten(),
            positions=positions.flatten(),
            out_cache_loc=locs.flatten(),
            req_pool_indices=forward_batch.req_pool_indices,
            seq_lens=seq_lens,
            kv_indices=forward_batch.kv_indices,
            seq_lens_cpu=forward_batch.seq_lens_cpu,
            custom_mask=custom_mask,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            spec_info=spec_info,
            spec_hidden_states=spec_hidden_states,
        )

    def _columns(
        self, seq_lens: torch.Tensor, width: int, forward_batch: ForwardBatch
    ) -> torch.Tensor | None:
        """See `visible_columns`. A chain lies in its row in order and needs no mask of its own."""
        if self.topk == 1:
            return None
        return visible_columns(seq_lens, width, forward_batch.kv_indices.shape[1])

    def _custom_mask(
        self, padded_mask: torch.Tensor, columns: torch.Tensor | None
    ) -> torch.Tensor | None:
        return None if columns is None else expand_local_mask(padded_mask, columns)

    def _draft_topk(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The draft's best tokens and their probabilities, as ids of the target; (rows, topk)."""
        topk_p, draft_ids = torch.softmax(logits.float(), dim=-1).topk(self.topk, dim=-1)
        return topk_p, self.draft_runner.model.to_target_ids(draft_ids)


def _rows_of(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Of `values`, shape (B * N, ...), each request's rows at `index`, shape (B, M).

    Returns a tensor of shape (B * M, ...).
    """
    return values.index_select(0, _row_index(values.shape[0] // index.shape[0], index))


def _row_index(num_rows: int, index: torch.Tensor) -> torch.Tensor:
    """Rows at `index`, shape (B, M), of requests that have `num_rows` each; shape (B * M,)."""
    first = torch.arange(0, num_rows * index.shape[0], num_rows, device=index.device)
    return (index + first.unsqueeze(1)).flatten()


def _ends(lens: list[int]) -> list[int]:
    """Index of the last token of each request when their tokens lie in a row."""
    ends, end = [], -1
    for length in lens:
        end += length
        ends.append(end)
    return ends
