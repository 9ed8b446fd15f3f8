"""What authors of engines and log stores test with. The code is in the outer layer, `tailrace_outer.testing`."""

from tailrace_outer.testing import *  # noqa: F403
from tailrace_outer.testing import __all__ as __all__
