"""The two fixes on SGLang as it is released and forked.

Six verbs: get releases (fetch), ask whether a tree has the defects (status), take the fixes over as they
are (pick) or by their meaning (port), run real code before and after (prove), and all of it on many
releases (matrix).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from upstream import engine_proof, matrix, pick, port, prove, releases
from upstream.checkouts import CheckoutError, find_tree, merge_name
from upstream.engine_proof import EngineError
from upstream.prove import ProveError, Proven
from upstream.releases import ReleaseError
from upstream.shapes import ShapeError
from upstream.status import FIXES, Status, status

Done = pick.Picked | port.Ported

# Exit statuses. 2 is argparse's.
OK: Final = 0
FAILED: Final = 1
UNKNOWN_SHAPE: Final = 3
AFFECTED: Final = 4
CONFLICT: Final = 5
NOT_PROVEN: Final = 6

_STATUSES: Final = f"""\
exit status:
  {OK}  done, or nothing to do
  {FAILED}  it could not be done; the message says why
  2  wrong usage
  {UNKNOWN_SHAPE}  code of a shape that is not known: a person has to look
  {AFFECTED}  status: a defect is there and reached, whatever else is (latent alone is {OK})
  {CONFLICT}  pick: a commit conflicts, and nothing was changed
  {NOT_PROVEN}  prove, matrix: something is not as it has to be
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; return the exit status."""
    args = parser().parse_args(argv)
    # What is temporary is cleaned up by whoever catches this.
    for name in (signal.SIGTERM, signal.SIGHUP):
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(name, _stop)
    try:
        return args.verb(args)
    except BrokenPipeError:
        # Who reads has enough. What is still to be written must not complain at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except _EXPECTED as error:
        if args.json:
            print(json.dumps({"error": str(error)}, indent=2))
        print(f"upstream {args.name}: error: {error}", file=sys.stderr)
        return UNKNOWN_SHAPE if isinstance(error, ShapeError) else FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return FAILED


_EXPECTED: Final = (CheckoutError, EngineError, OSError, ProveError, ReleaseError, ShapeError)


def _stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python scripts/upstream",
        description=__doc__,
        epilog=_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = top.add_subparsers(title="verbs", metavar="VERB", required=True)
    _add_fetch(verbs)
    _add_status(verbs)
    _add_pick(verbs)
    _add_port(verbs)
    _add_prove(verbs)
    _add_matrix(verbs)
    return top


def _add(
    verbs: Any, name: str, verb: Callable[[argparse.Namespace], int], text: str, examples: str
) -> argparse.ArgumentParser:
    lines = "".join(f"  python scripts/upstream {name} {line}\n" for line in examples.splitlines())
    sub = verbs.add_parser(
        name,
        help=text.partition(". ")[0].partition("\n")[0],
        description=text,
        epilog=f"examples:\n{lines}\n{_STATUSES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.set_defaults(verb=verb, name=name)
    return sub


def _add_tree(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "tree",
        type=Path,
        metavar="TREE",
        help="a checkout of SGLang or of a fork, its python folder, a release that was fetched, "
        "or an installed package",
    )


def _add_fixes(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--fix",
        type=int,
        action="append",
        choices=sorted(FIXES),
        help="this fix alone (may be given again)",
    )


def _fixes(args: argparse.Namespace) -> list[int]:
    """The fixes that were asked for, in the order of history."""
    return [pr for pr in FIXES if args.fix is None or pr in args.fix]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _again(*arguments: object) -> str:
    """A command line of this program, as it was called."""
    return shlex.join([os.path.relpath(sys.executable), sys.argv[0], *map(str, arguments)])


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


# --- fetch --------------------------------------------------------------------------------------


def _add_fetch(verbs: Any) -> None:
    text = (
        "Get releases of SGLang from the package index, each as a git repository.\n"
        "They go to .cache/upstream/VERSION, with the tag vVERSION and the package at python/sglang."
    )
    examples = "0.5.10rc0 0.5.14\n--environment 0.5.14\n--remove"
    sub = _add(verbs, "fetch", _fetch, text, examples)
    sub.add_argument("versions", nargs="*", metavar="VERSION")
    sub.add_argument(
        "--environment",
        action="store_true",
        help="an interpreter for each, too (1.4 GB for the older ones, and 1.4 GB for the newer ones)",
    )
    sub.add_argument(
        "--remove", action="store_true", help="remove .cache/upstream: releases, environments, logs"
    )
    sub.add_argument("--remove-environments", action="store_true", help="remove those alone")


def _fetch(args: argparse.Namespace) -> int:
    if args.remove or args.remove_environments:
        releases.remove(environments_only=not args.remove)
        _say("removed")
    elif not args.versions:
        _say("upstream fetch: which VERSION? For example 0.5.14")
        return 2
    done: dict[str, Any] = {}
    missing: list[str] = []
    for count, version in enumerate(args.versions, 1):

        def say(line: str, count: int = count) -> None:
            _say(f"[{count}/{len(args.versions)}] {line}")

        # Without a network, all that is missing is told at once.
        try:
            done[version] = {"tree": str(releases.release(version, say=say))}
            if args.environment:
                done[version]["python"] = str(releases.environment(version, say=say))
        except (ReleaseError, CheckoutError, OSError) as error:
            missing.append(version)
            done[version] = {"error": str(error)}
            say(f"error: {error}")
    if args.json:
        _print_json(done)
    if missing:
        _say(f"upstream fetch: error: not to be had: {', '.join(missing)}")
    return FAILED if missing else OK


# --- status -------------------------------------------------------------------------------------


def _add_status(verbs: Any) -> None:
    text = (
        "Say for each fix whether a tree has the defect, with file and line.\n"
        "Verdicts: not affected; latent (there, and not reached with the usual settings; what reaches "
        "it is told);\naffected; fixed; unknown. Nothing is imported or run."
    )
    sub = _add(verbs, "status", _status, text, "~/sglang\n--json .cache/upstream/0.5.10rc0")
    _add_tree(sub)


def _status(args: argparse.Namespace) -> int:
    tree = find_tree(args.tree)
    found = status(tree)
    if args.json:
        _print_json(
            {
                "package": str(tree.package),
                "version": tree.version(),
                "fixes": [s.as_dict() for s in found],
            }
        )
    else:
        print(f"SGLang {tree.version() or 'of unknown version'} in {tree.package}")
        for one in found:
            _print_status(one)
    verdicts = {one.verdict for one in found}
    if "affected" in verdicts:
        return AFFECTED
    return UNKNOWN_SHAPE if "unknown" in verdicts else OK


def _print_status(one: Status) -> None:
    print(f"\n#{one.pr} {FIXES[one.pr]}\n  {one.verdict.upper()}: {one.reason}")
    for place in one.places:
        print(f"    {place}")


# --- pick ---------------------------------------------------------------------------------------


def _add_branch(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--branch",
        default=port.BRANCH,
        help="made from what is checked out, or gone on with if it is ahead of that (%(default)s)",
    )


def _add_pick(verbs: Any) -> None:
    text = (
        "Cherry-pick (-x) the fix commits of this repository onto a branch of a checkout.\n"
        "It is tried in a temporary repository first, in order. At a conflict nothing is changed. What "
        "is\nchecked out stays as it was, unless it is that branch."
    )
    examples = "--fix 21840 ~/sglang\n--dry-run ~/sglang"
    sub = _add(verbs, "pick", _pick, text, examples)
    _add_tree(sub)
    _add_fixes(sub)
    _add_branch(sub)
    sub.add_argument("--dry-run", action="store_true", help="try it, and change nothing")


def _pick(args: argparse.Namespace) -> int:
    done = pick.pick(find_tree(args.tree), _fixes(args), args.branch, dry_run=args.dry_run)
    lines = []
    for one in done:
        what = f" as {one.commit[:10]}" if one.commit else ""
        where = f" in {', '.join(one.conflicts)}" if one.conflicts else ""
        lines.append(f"#{one.pr} ({one.source[:10]}): {one.outcome}{what}{where}")
    _tell(args, done, [*lines, _after_picking(done, args)])
    return CONFLICT if pick.conflicts(done) else OK


def _after_picking(done: Sequence[pick.Picked], args: argparse.Namespace) -> str:
    if pick.conflicts(done):
        stuck = next(one.pr for one in done if one.outcome == pick.CONFLICT)
        lines = [
            "Nothing was changed. The text around the change is another one in this tree; the port "
            "knows its meaning:",
            f"  {_again('port', '--fix', stuck, args.tree)}",
        ]
        if fits := [one.pr for one in done if one.outcome == pick.FITS]:
            fixes = [word for pr in fits for word in ("--fix", pr)]
            lines += ["What fits can be picked alone:", f"  {_again('pick', *fixes, args.tree)}"]
        return "\n".join(lines)
    return _where(done, any(one.outcome == pick.FITS for one in done), args)


def _tell(args: argparse.Namespace, done: Sequence[Done], lines: Sequence[str]) -> None:
    """Print what became of the fixes, which are on the branch if any has a commit."""
    if args.json:
        branch = args.branch if any(one.commit for one in done) else None
        _print_json({"branch": branch, "fixes": [one.as_dict() for one in done]})
    else:
        print(*lines, sep="\n")


def _where(done: Sequence[Done], would: bool, args: argparse.Namespace) -> str:
    """What has become of the branch."""
    if any(one.commit for one in done):
        name = merge_name(args.tree, args.branch)
        return f"They are on the branch {args.branch}. Unless you are on it: git merge {name}"
    return "Nothing was changed: it was a dry run." if would else "Nothing to do."


# --- port ---------------------------------------------------------------------------------------


def _add_port(verbs: Any) -> None:
    text = (
        "Write the fixes into a tree by their meaning, whatever shape it has.\n"
        "One commit each on a branch; what is checked out stays as it was, unless it is that branch. "
        "Where a\nshape is not known, nothing is changed and the place is told."
    )
    examples = "~/sglang\n--diff ~/venv/lib/python3.12/site-packages/sglang > fixes.patch"
    sub = _add(verbs, "port", _port, text, examples)
    _add_tree(sub)
    _add_fixes(sub)
    _add_branch(sub)
    sub.add_argument(
        "--diff",
        action="store_true",
        help="print a patch (for patch -p1 beside the folder sglang) and change nothing; needs no git",
    )
    sub.add_argument("--dry-run", action="store_true", help="try it, and change nothing")


def _port(args: argparse.Namespace) -> int:
    tree = find_tree(args.tree)
    if args.diff:
        return _port_diff(tree, args)
    done = port.port(tree, _fixes(args), args.branch, dry_run=args.dry_run)
    _tell(args, done, [*map(_ported_lines, done), _after_porting(done, args)])
    return UNKNOWN_SHAPE if port.unknown(done) else OK


def _after_porting(done: Sequence[port.Ported], args: argparse.Namespace) -> str:
    portable = [one.pr for one in done if one.outcome == port.PORTABLE]
    if not port.unknown(done):
        return _where(done, bool(portable), args)
    lines = ["Nothing was changed. docs/backporting.md says how to do it by hand."]
    if portable:
        fixes = [word for pr in portable for word in ("--fix", pr)]
        lines += ["What is known can be ported alone:", f"  {_again('port', *fixes, args.tree)}"]
    return "\n".join(lines)


def _ported_lines(one: port.Ported) -> str:
    first = f"#{one.pr}: {one.outcome}" + (f" as {one.commit[:10]}" if one.commit else "")
    return "\n    ".join([first, *one.shapes])


def _port_diff(tree: Any, args: argparse.Namespace) -> int:
    done, patch = port.patch(tree, _fixes(args))
    if args.json:
        _print_json({"patch": patch, "fixes": [one.as_dict() for one in done]})
    else:
        # In the encoding of the files, whatever the terminal's is.
        sys.stdout.flush()
        sys.stdout.buffer.write(patch.encode(errors="surrogateescape"))
        sys.stdout.flush()
    for one in done:
        _say(_ported_lines(one))
    return UNKNOWN_SHAPE if port.unknown(done) else OK


# --- prove --------------------------------------------------------------------------------------


def _add_engine(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--engine",
        action="store_true",
        help="with the whole Engine and a real model, too, which takes minutes",
    )
    sub.add_argument(
        "--scenario",
        action="append",
        choices=prove.ENGINE,
        help="with --engine, this alone: merge is the situation of #21840 from end to end, texts "
        "compares texts with those of this project's engine",
    )


def _engine(args: argparse.Namespace) -> Sequence[str]:
    if not args.engine:
        return ()
    # Before anything has taken minutes.
    if not engine_proof.MODEL.is_dir():
        raise ProveError(f"there is no model in {engine_proof.MODEL}: make model")
    if missing := [name for name in ("torch", "tokenizers") if not importlib.util.find_spec(name)]:
        raise ProveError(
            f"{sys.executable} has no {missing[0]} to run this project's engine with: take the .venv "
            "that `make env` makes"
        )
    return args.scenario or prove.ENGINE


def _add_prove(verbs: Any) -> None:
    text = (
        "Run real code of a tree before and after the fixes, and print what came of it.\n"
        "The tree is not changed: what has the fixes is a copy. No GPU is needed. An environment for it "
        "is made in\n.cache/upstream if there is none (1.4 GB; fetch --remove-environments removes it)."
    )
    examples = "~/sglang\n--engine --scenario merge .cache/upstream/0.5.10rc0"
    sub = _add(verbs, "prove", _prove, text, examples)
    _add_tree(sub)
    _add_engine(sub)
    sub.add_argument(
        "--python", type=Path, help="an interpreter of yours that has what the tree imports"
    )


def _prove(args: argparse.Namespace) -> int:
    tree = find_tree(args.tree)
    engine = _engine(args)
    python = prove.interpreter_for(tree, args.python, _say)
    proven = prove.prove(tree, python, engine=engine, say=_say)
    if args.json:
        _print_json(proven.as_dict())
    else:
        _print_proven(proven)
    return OK if proven.holds else NOT_PROVEN


def _print_proven(proven: Proven) -> None:
    for before, after in zip(proven.before, proven.after, strict=True):
        how = proven.how[before.pr]
        print(f"#{before.pr}: {before.verdict}; {how}; then {after.verdict}")
        if after.verdict == "unknown":
            print(f"    {after.reason}")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("scenario", "before", "after", "holds"):
        table.add_column(column, overflow="fold")
    for proof in proven.proofs:
        cells = (proof.scenario, proof.before, proof.after, "yes" if proof.holds else "NO")
        table.add_row(*(escape(cell) for cell in cells))
    # A pipe or a file has no width of its own.
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    for proof in proven.proofs:
        lines = [*proof.quote.splitlines(), *(f"log: {log}" for log in proof.logs)]
        for line in (*lines, *(f"WRONG: {what}" for what in proof.wrong)):
            print(f"{proof.scenario}: {line}")


# --- matrix -------------------------------------------------------------------------------------


def _add_matrix(verbs: Any) -> None:
    text = (
        "Verdict, cherry-pick, port and proof of both fixes on many releases.\n"
        "Without VERSION it is all that expected.json has. What is not as it says there is a failure."
    )
    examples = "--engine --write docs/upstream-matrix.md\n0.5.10rc0 0.5.14"
    sub = _add(verbs, "matrix", _matrix, text, examples)
    sub.add_argument("versions", nargs="*", metavar="VERSION")
    _add_engine(sub)
    sub.add_argument("--write", type=Path, metavar="FILE", help="write a page of it")


def _matrix(args: argparse.Namespace) -> int:
    if args.write and (args.versions or not args.engine or args.scenario):
        _say("upstream matrix: --write wants all of it: no VERSION, --engine, and no --scenario")
        return 2
    rows = matrix.run(args.versions or list(matrix.expected()), _engine(args), _say)
    bad = sum(bool(row.differences) for row in rows)
    if args.write:
        # What is not as expected is no page to keep.
        path = args.write.with_suffix(".failed.md") if bad else args.write
        path.write_text(matrix.page(rows))
        _say(f"written to {path}")
    if args.json:
        _print_json(matrix.as_json(rows))
    for row in rows:
        for line in row.differences:
            _say(f"{row.version}: {line}")
    _say(f"{len(rows) - bad} of {len(rows)} releases are as expected")
    return NOT_PROVEN if bad else OK
