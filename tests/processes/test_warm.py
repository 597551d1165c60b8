"""Programs that begin with torch imported are otherwise as those of an interpreter of their own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.warm import _servers, warm

pytestmark = pytest.mark.e2e

TELLS = """
import atexit, json, os, sys, threading
print(json.dumps({
    "parent": os.getppid(), "thread": threading.get_native_id() == os.getpid(),
    "session": os.getsid(0) == os.getpid(), "folder": os.getcwd(), "arguments": sys.argv,
    "command": sys.orig_argv, "path": sys.path[0], "name": __name__, "open": os.listdir("/dev/fd"),
    "variable": os.environ.get("OF_A_TEST"),
    "main": vars(sys.modules["__main__"]) is globals(), "input": sys.stdin.read(),
}))
atexit.register(print, "the end")
threading.Timer(0.01, lambda: print("of a thread")).start()
"""
CODES = {"0": 0, "3": 3, "None": 0, "'why'": 1}


def told(*words: str, **options: Any) -> tuple[dict[str, Any], list[str]]:
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=True, **options
    )
    first, *rest = done.stdout.splitlines()
    return json.loads(first), rest


@pytest.mark.parametrize("kind", ["-c", "-m", "script"])
def test_a_program_finds_what_it_would_find(kind: str, tmp_path: Path) -> None:
    (tmp_path / "tells.py").write_text(TELLS)
    command = {"-c": ["-c", TELLS, "x"], "-m": ["-m", "tells", "x"], "script": ["tells.py", "x"]}
    options: dict[str, Any] = {
        "cwd": tmp_path,
        "input": "what it reads",
        "env": {**os.environ, "OF_A_TEST": "1"},
        "start_new_session": True,
    }
    expected = told(*command[kind], **options)
    with warm():
        found = told(*command[kind], **options)
    assert found == expected
    assert found[1] == ["of a thread", "the end"]


def test_it_ends_as_it_would_end() -> None:
    def ended(code: str) -> tuple[int, str, list[str]]:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        # From Python 3.13 on the lines of `-c` are shown, too.
        said = [line for line in done.stderr.splitlines() if not line.startswith("    ")]
        return done.returncode, done.stdout, said

    codes = [f"import sys; print(1); sys.exit({code})" for code in CODES]
    codes += ["1 / 0", "import os; os.abort()", "raise KeyboardInterrupt", "print(2", "import none"]
    expected = [ended(code) for code in codes]
    with warm():
        assert [ended(code) for code in codes] == expected
    assert [code for code, _, _ in expected[: len(CODES)]] == [*CODES.values()]


def test_what_it_starts_is_its_child_and_dies_by_signals() -> None:
    inner = "import os, signal; print(os.getppid(), flush=True); signal.pause()"
    outer = (
        "import os, signal, subprocess, sys\n"
        f"inner = subprocess.Popen([sys.executable, '-u', '-c', {inner!r}], stdout=-1)\n"
        "print(int(inner.stdout.readline()) == os.getpid(), 'torch' in sys.modules)\n"
        "inner.send_signal(signal.SIGTERM)\n"
        "print(inner.wait())\n"
    )
    with warm(inside=1):
        done = subprocess.run([sys.executable, "-c", outer], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "True", str(-signal.SIGTERM)], done.stderr


def test_what_needs_an_interpreter_of_its_own_gets_one() -> None:
    code = "import os, sys; print('torch' in sys.modules, os.environ.get('PYTHONHASHSEED'))"
    with warm():
        for words, variables in ((["-I"], {}), ([], {"PYTHONHASHSEED": "7"})):
            output = subprocess.check_output(
                [sys.executable, *words, "-c", code], env={**os.environ, **variables}, text=True
            )
            assert output.split() == ["False", str(variables.get("PYTHONHASHSEED"))]


def test_the_first_test_that_starts_programs_may_have_changed_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = {**os.environ}
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with warm(imports=("colorsys",)):  # nobody has begun with it
        found = subprocess.run(
            [sys.executable, "-c", "import sys; print({'torch', 'colorsys'} <= {*sys.modules})"],
            env=before,
            capture_output=True,
            text=True,
            check=True,
        )
    assert found.stdout == "True\n"


def test_where_the_process_that_is_cloned_was_killed_programs_begin_cold() -> None:
    words = [sys.executable, "-c", "import sys; print('torch' in sys.modules)"]
    with warm(imports=("chunk",)):
        assert subprocess.check_output(words) == b"True\n"
        server = _servers[os.getpid(), ("chunk",)].process
        assert server is not None
        os.kill(server, signal.SIGKILL)
        os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
        with pytest.warns(UserWarning, match="ended, with -9"):
            assert subprocess.check_output(words) == b"False\n"
        assert subprocess.check_output(words) == b"False\n"
    with warm(imports=("chunk",)):
        assert subprocess.check_output(words) == b"True\n"
