"""What authors of kinds of folders import: `tailrace_outer.serve.folders`."""

from tailrace_outer.serve.folders import *  # noqa: F403
from tailrace_outer.serve.folders import __all__ as __all__
