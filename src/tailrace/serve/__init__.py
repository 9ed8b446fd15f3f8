"""`from tailrace import serve`: what users' apps import. The code is in the outer layer, `tailrace_outer.serve`."""

from tailrace_outer.serve import *  # noqa: F403
from tailrace_outer.serve import __all__ as __all__
