"""Tells whether the Python at hand can run kgen as it is; `make VENV=0 ...` asks first.

Takes nothing, prints what is missing and how to get it, exits with 0 or 1.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

#: Requirement of pyproject.toml to the module it brings.
MODULES = {
    "jinja2": "jinja2",
    "cuda-python": "cuda.bindings",
    "numpy": "numpy",
    "torch": "torch",
    "optuna": "optuna",
    "sqlalchemy": "sqlalchemy",
    "rich": "rich",
    "pytest": "pytest",
    "pytest-timeout": "pytest_timeout",
    "hypothesis": "hypothesis",
}
OLDEST = (3, 11)


def is_there(module: str) -> bool:
    """Whether a module can be found; its package is imported for a dotted name."""
    try:
        return find_spec(module) is not None
    except ImportError:
        return False


def main() -> int:
    """Print what is missing; 0 when nothing is."""
    if sys.version_info < OLDEST:
        print(f"{sys.executable} is Python {sys.version.split()[0]}: kgen needs 3.11 or newer")
        return 1
    missing = [name for name, module in MODULES.items() if not is_there(module)]
    if not missing:
        return 0
    print(f"{sys.executable} lacks {', '.join(missing)}. VENV=0 installs nothing. Either run")
    wanted = " ".join("'cuda-python[all]'" if name == "cuda-python" else name for name in missing)
    print(f"  {sys.executable} -m pip install -c constraints.txt {wanted}")
    print("or, on a machine without network, install the wheels of `make wheels`:")
    print("  see 'A GPU machine without network' in CONTRIBUTING.md")
    return 1


if __name__ == "__main__":
    sys.exit(main())
