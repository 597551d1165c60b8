"""What `trainkit test --gpu` does: try the accelerators of this machine, and write a page on it."""

import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from trainkit.basics.device import accelerator_count, accelerator_kind
from trainkit.errors import ConfigError
from trainkit.launch.machine import gpu_names
from trainkit.version import __version__

_SECONDS = 600.0  # of all parts together
_GRACE = 20.0  # in which a part ends that was asked to
_MOST_LINES = 400  # of what one part has printed


def write_page(path: Path, further: Sequence[str] = ()) -> int:
    """Run all parts, each in processes of its own; return 0 if all went well.

    Args:
        path: Of the page, in Markdown.
        further: Commands to run besides, as a shell reads them.
    """
    kind, count = accelerator_kind(), accelerator_count()
    if kind is None:
        raise ConfigError(
            f"torch {torch.__version__} can use no accelerator of this machine, so `--gpu` has "
            "nothing to test. `trainkit test --cpu` checks that processes work together."
        )
    start, rows, sections, failed = time.monotonic(), [], [], 0
    for title, command in _parts(count, further):
        print(f"{title} ...", flush=True)
        began = time.monotonic()
        outcome, output = _run(command, max(0.0, start + _SECONDS - began))
        print(f"    {outcome}", flush=True)
        failed += outcome != "ok"
        rows.append(f"| {title} | {outcome} | {time.monotonic() - began:.0f} |")
        lines = output.splitlines()
        cut = [f"(... {len(lines) - _MOST_LINES} lines)"] if lines[_MOST_LINES:] else []
        text = "\n".join([*cut, *lines[-_MOST_LINES:]])
        sections.append(f"## {title}\n\n    {shlex.join(command)}\n\n````text\n{text}\n````")
    head = f"""# trainkit {__version__} on {", ".join(dict.fromkeys(gpu_names())) or kind}

{count} of type "{kind}", torch {torch.__version__}, Python {platform.python_version()}. {failed} of
{len(rows)} parts did not go well; all took {time.monotonic() - start:.0f} s. Look this page over
before you send it: it names folders, and environment variables that matter to torch.

| part | outcome | seconds |
| --- | --- | --- |
"""
    page = head + "\n".join(rows) + "\n\n" + "\n\n".join(sections) + "\n"
    path.write_text(page, encoding="utf-8")
    print(f"{failed} of {len(rows)} parts did not go well. The page is `{path}`.")
    return int(failed > 0)


def _parts(count: int, further: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield a title and a command for each part."""
    python = [sys.executable, "-u", "-m"]
    test = [*python, "trainkit.cli", "test", "--num_processes"]
    yield "versions and devices", [*python, "trainkit.cli", "env"]
    for size in (1, 2)[:count]:
        yield f"{size} process(es) work together", [*test, f"{size}"]
    yield "the same training in other ways", [*test, f"{min(2, count)}", "--determinism"]
    yield "speed beside a loop by hand", [*python, "trainkit.testing.speed"]
    for command in further:
        yield f"`{command}`", shlex.split(command)


def _run(command: Sequence[str], seconds: float) -> tuple[str, str]:
    """Return how a command ended, in words, and what it printed."""
    with tempfile.TemporaryFile() as file:  # no pipe: what it leaves behind would hold it open
        with subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as process:
            try:
                code = process.wait(seconds)
                outcome = "ok" if code == 0 else f"FAILED (exit code {code})"
            except subprocess.TimeoutExpired:
                outcome = f"not done after {seconds:.0f} s: time was up"
            finally:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_GRACE)
                process.kill()
        file.seek(0)
        return outcome, file.read().decode("utf-8", "replace")
