"""What penalties cost a step: a grid of cells, five subjects, and the targets that they are held to.

========  ==========================================================================================
sparse    the package's planner and state. Its time has a part on the host (plan, settle) and one on
          the device's side (begin, stage, apply, commit)
one_pass  dense penalties in one pass, see `lab.dense_one_pass`
upstream  the penalizers of a real release, see `lab.upstream_penalties`, without overlap
overlap   the same with overlap: what a forward takes along is copied each step
floor     what any penalties in place would have to read and write at least, and no arithmetic; on the
          CPU, with numba. It is no opponent, and shows how much there is left to gain
========  ==========================================================================================

Each request has all penalties, two stop tokens and a minimum length that it does not reach. It has said
``seen`` distinct tokens, some of them twice, and goes on saying these, so that a cell stays what it is.
``plain`` decodes one token. ``chain`` verifies 4 nodes, root included, and ``tree`` 16 in a binary tree;
every other drafted token is new. ``join`` is a finish plus a join: one request of the batch goes and a
new one comes.

All subjects get the same logits and tokens and take turns, block of steps by block; a ratio is the
median over rounds of the other's time by ours. The first step of a block is not timed: behind another
subject's it would find its threads asleep and none of its code or state in a cache. With ``cold`` it is
the other way round: before each step memory is swept through the caches, as a forward's weights are.

Logits are penalized again and again, which no operation's time depends on. At last each subject does one
step on fresh logits, and rows of it are compared with penalties in float64 that know only which steps
and joins were done: the state of all of them has to be right. Only the floor, which penalizes nothing,
is not compared.

On the CPU a step's time is the wall time of all its parts. On CUDA it is a share of the time between two
events around a block of steps (with ``cold``, around each), on a stream that is kept waiting until all
of them have been launched; so gaps of launching are not in it, as they are not where the host runs
ahead. The host's part is shown beside it. Nothing waits for the device until a cell has been measured;
a join is work of the host above all, and is timed alone, by the host's clock, with a wait at either end.
Where a block was launched too late for the device to be kept waiting, the blocks count that were not.

- `workload`: the cells, and what all subjects get
- `subjects`: those that penalize, and the floor
- `truth`: whether the work was done
- `measuring`: time and memory of a cell
- `targets`: what the results are held to
"""

from lab.metrics import WorkNotDone
from lab.penalty_costs.measuring import (
    Block,
    CellResult,
    Joiner,
    Options,
    Stepper,
    measure,
    temporaries,
)
from lab.penalty_costs.subjects import (
    OTHERS,
    OnePass,
    Overlap,
    Sparse,
    Subject,
    Touch,
    Upstream,
)
from lab.penalty_costs.targets import TARGETS, Miss, Target, Verdict, verdicts
from lab.penalty_costs.truth import check, check_joined, true_row
from lab.penalty_costs.workload import (
    CELL_BYTES,
    KINDS,
    QUICK,
    REQUEST,
    Cell,
    Logits,
    Request,
    Turn,
    Workload,
    grid,
)

__all__ = [
    "CELL_BYTES",
    "KINDS",
    "OTHERS",
    "QUICK",
    "REQUEST",
    "TARGETS",
    "Block",
    "Cell",
    "CellResult",
    "Joiner",
    "Logits",
    "Miss",
    "OnePass",
    "Options",
    "Overlap",
    "Request",
    "Sparse",
    "Stepper",
    "Subject",
    "Target",
    "Touch",
    "Turn",
    "Upstream",
    "Verdict",
    "WorkNotDone",
    "Workload",
    "check",
    "check_joined",
    "grid",
    "measure",
    "temporaries",
    "true_row",
    "verdicts",
]
