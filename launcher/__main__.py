"""`launch`, and `python -m launcher`: who interrupts it while its commands are imported sees no
traceback.

Run by its path it stands for launch too, wherever it lies; after `paths.MODULE_FLAG` it runs
another module of this package.
"""

import gc
import os
import sys

# launcher.errors.Exit, which cannot be imported where nothing can be
NOT_READY = 5
INTERRUPTED = 130
NO_MEMORY = (
    "error[resource-limit]: "
    "the memory that this command may use does not hold it: see `ulimit -v`\n"
)


def leave_current_folder() -> None:
    """Import nothing from the current folder if only `-m` or an empty PYTHONPATH entry names it."""
    project = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    try:
        folder = os.getcwd()
    except OSError:
        # a folder that was removed holds no code
        folder = ""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    by_variable = "" in entries and entries != [""]
    by_module = not sys.flags.safe_path and sys.path[:1] == [folder]
    is_installed = folder.startswith((os.path.dirname(os.__file__), sys.prefix))
    is_named = is_installed or folder in ("", project, *entries)
    if not is_named and (by_variable or by_module):
        sys.path[:] = [entry for entry in sys.path if entry not in ("", folder)]
    if project not in map(os.path.realpath, sys.path):
        sys.path.insert(0, project)


def run_module(name: str) -> None:
    """Run a module of this package as `python -m` would, with the words that follow its name."""
    import runpy

    sys.argv = sys.argv[2:]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def main() -> None:
    # what is imported stays: to look for garbage in it takes 10 ms of a start
    gc.set_threshold(50_000)
    leave_current_folder()
    try:
        from launcher.paths import MODULE_FLAG

        if sys.argv[1:2] == [MODULE_FLAG]:
            run_module(sys.argv[2])
            return
        from launcher.cli import main
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except (MemoryError, ImportError) as error:
        # a library that finds no memory says so in words
        limited = isinstance(error, MemoryError) or "failed to map segment" in str(error)
        if not limited:
            raise
        if sys.stderr is not None:
            sys.stderr.write(NO_MEMORY)
        sys.exit(NOT_READY)
    main.main()


if __name__ == "__main__":
    main()
