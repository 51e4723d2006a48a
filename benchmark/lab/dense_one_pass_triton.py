"""The kernel of `lab.dense_one_pass` for GPUs."""

import triton
import triton.language as tl


@triton.jit
def kernel(
    logits,
    counts,
    stops,
    biases,
    params,
    num_output,
    min_new,
    drafts,
    ancestors,
    vocab_size,
    NODES: tl.constexpr,
    IS_TREE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Penalize a block of columns in all rows of one request. Grid (blocks of the vocabulary, B)."""
    request = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < vocab_size
    places = request * vocab_size + columns
    count = tl.load(counts + places, mask=is_inside, other=0)
    stop = tl.load(stops + places, mask=is_inside, other=0)
    bias = tl.load(biases + places, mask=is_inside, other=0.0)
    frequency = tl.load(params + request * 3)
    presence = tl.load(params + request * 3 + 1)
    repetition = tl.load(params + request * 3 + 2)
    length = tl.load(num_output + request)
    most = tl.load(min_new + request)

    # Whether any token of the tree falls into this block.
    is_touched = 0
    if IS_TREE:
        for other in range(1, NODES):
            token = tl.load(drafts + request * NODES + other)
            is_touched += (token // BLOCK == tl.program_id(0)).to(tl.int32)

    for node in range(NODES):
        total = count
        on_way = length
        if IS_TREE:
            way = ancestors + (request * NODES + node) * NODES
            for other in range(1, NODES):
                on_way += tl.load(way + other).to(tl.int32)
            if is_touched > 0:
                for other in range(1, NODES):
                    token = tl.load(drafts + request * NODES + other)
                    total += (columns == token).to(tl.int32) * tl.load(way + other).to(tl.int32)
        row = logits + (request * NODES + node) * vocab_size + columns
        x = tl.load(row, mask=is_inside, other=0.0)
        scaled = x - (frequency * total.to(tl.float32) + presence)
        scaled = tl.where(scaled < 0, scaled * repetition, tl.div_rn(scaled, repetition))
        x = tl.where(total > 0, scaled, x) + bias
        is_masked = (stop != 0) & (on_way + columns * 0 < most)
        x = tl.where(is_masked, float("-inf"), x)
        tl.store(row, x, mask=is_inside)
