"""A client of servers, for authors of commands. The code is in the outer layer, `tailrace_outer.client`."""

from tailrace_outer.client.connection import *  # noqa: F403
from tailrace_outer.client.connection import __all__ as __all__
