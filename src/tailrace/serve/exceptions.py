"""The errors that apps catch: `tailrace_outer.serve.exceptions`."""

from tailrace_outer.serve.exceptions import *  # noqa: F403
from tailrace_outer.serve.exceptions import __all__ as __all__
