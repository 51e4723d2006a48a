"""The two fixes on SGLang as it is released and forked.

Six verbs: get releases (fetch), ask whether a tree has the defects (status), take the fixes over as they
are (pick) or by their meaning (port), run real code before and after (prove), and all of it on many
releases (matrix).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from upstream import pick, port, releases
from upstream.checkouts import CheckoutError, find_tree
from upstream.releases import ReleaseError
from upstream.shapes import ShapeError
from upstream.status import FIXES, Status, status

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
  {AFFECTED}  status: the tree is affected by a fix's defect
  {CONFLICT}  pick: a commit conflicts, and nothing was changed
  {NOT_PROVEN}  prove, matrix: something is not as it has to be
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; return the exit status."""
    args = parser().parse_args(argv)
    try:
        return args.verb(args)
    except (CheckoutError, ReleaseError, ShapeError) as error:
        if args.json:
            print(json.dumps({"error": str(error)}, indent=2))
        print(f"upstream {args.name}: error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return FAILED


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
        "--environment", action="store_true", help="an interpreter for each, too (1.4 GB for all)"
    )
    sub.add_argument(
        "--remove", action="store_true", help="remove releases and environments, all of them"
    )


def _fetch(args: argparse.Namespace) -> int:
    if args.remove:
        releases.remove()
        _say("removed .cache/upstream")
    elif not args.versions:
        _say("upstream fetch: which VERSION? For example 0.5.14")
        return 2
    done: dict[str, Any] = {}
    for count, version in enumerate(args.versions, 1):

        def say(line: str, count: int = count) -> None:
            _say(f"[{count}/{len(args.versions)}] {line}")

        tree = releases.release(version, say=say)
        done[version] = {"tree": str(tree)}
        if args.environment:
            done[version]["python"] = str(releases.environment(version, say=say))
    if args.json:
        _print_json(done)
    return OK


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
    if "unknown" in verdicts:
        return UNKNOWN_SHAPE
    return AFFECTED if "affected" in verdicts else OK


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
        "It is tried in a temporary working tree first, in order. At a conflict nothing is changed. "
        "What is\nchecked out stays as it was."
    )
    examples = "--fix 21840 ~/sglang\n--dry-run ~/sglang"
    sub = _add(verbs, "pick", _pick, text, examples)
    _add_tree(sub)
    _add_fixes(sub)
    _add_branch(sub)
    sub.add_argument("--dry-run", action="store_true", help="try it, and change nothing")


def _pick(args: argparse.Namespace) -> int:
    done = pick.pick(find_tree(args.tree), _fixes(args), args.branch, args.dry_run)
    if args.json:
        branch = None if args.dry_run else args.branch
        _print_json({"branch": branch, "fixes": [one.as_dict() for one in done]})
    else:
        for one in done:
            what = f" as {one.commit[:10]}" if one.commit else ""
            where = f" in {', '.join(one.conflicts)}" if one.conflicts else ""
            print(f"#{one.pr} ({one.source[:10]}): {one.outcome}{what}{where}")
        print(_after_picking(done, args))
    return CONFLICT if pick.conflicts(done) else OK


def _after_picking(done: Sequence[pick.Picked], args: argparse.Namespace) -> str:
    if pick.conflicts(done):
        stuck = next(one.pr for one in done if one.outcome == pick.CONFLICT)
        lines = [
            "Nothing was changed. The text around the change is another one in this tree; the port "
            "knows its meaning:",
            f"  python scripts/upstream port --fix {stuck} {args.tree}",
        ]
        if clean := [one.pr for one in done if one.outcome == pick.CLEAN]:
            fixes = " ".join(f"--fix {pr}" for pr in clean)
            lines += ["What fits can be picked alone:"]
            lines += [f"  python scripts/upstream pick {fixes} {args.tree}"]
        return "\n".join(lines)
    if not any(one.commit for one in done):
        return "Nothing to do."
    if args.dry_run:
        return "They fit. Nothing was changed: it was a dry run."
    return f"They are on the branch {args.branch}: git merge {args.branch}"


# --- port ---------------------------------------------------------------------------------------


def _add_port(verbs: Any) -> None:
    text = (
        "Write the fixes into a tree by their meaning, whatever shape it has.\n"
        "One commit each on a branch; what is checked out stays as it was. Where a shape is not known, "
        "nothing is\nchanged and the place is told."
    )
    examples = "~/sglang\n--diff ~/venv/lib/python3.12/site-packages/sglang > fixes.patch"
    sub = _add(verbs, "port", _port, text, examples)
    _add_tree(sub)
    _add_fixes(sub)
    _add_branch(sub)
    sub.add_argument(
        "--diff",
        action="store_true",
        help="print a patch (patch -p1 in the folder above sglang) and change nothing; needs no git",
    )


def _port(args: argparse.Namespace) -> int:
    tree = find_tree(args.tree)
    if args.diff:
        return _port_diff(tree, args)
    done = port.port(tree, _fixes(args), args.branch)
    if args.json:
        _print_json({"branch": args.branch, "fixes": [one.as_dict() for one in done]})
    else:
        for one in done:
            print(_ported_line(one))
            for shape in one.shapes:
                print(f"    {shape}")
        if port.unknown(done):
            print("Nothing was changed.")
        elif any(one.commit for one in done):
            print(f"They are on the branch {args.branch}: git merge {args.branch}")
        else:
            print("Nothing to do.")
    return UNKNOWN_SHAPE if port.unknown(done) else OK


def _ported_line(one: port.Ported) -> str:
    return f"#{one.pr}: {one.outcome}" + (f" as {one.commit[:10]}" if one.commit else "")


def _port_diff(tree: Any, args: argparse.Namespace) -> int:
    done, patch = port.patch(tree, _fixes(args))
    if args.json:
        _print_json({"patch": patch, "fixes": [one.as_dict() for one in done]})
    else:
        print(patch, end="")
    for one in done:
        _say(_ported_line(one) + "".join(f"\n    {shape}" for shape in one.shapes))
    return UNKNOWN_SHAPE if port.unknown(done) else OK
