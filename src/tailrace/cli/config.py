"""`tailrace config`, which is in the outer layer."""

from tailrace_outer.admin.config_command import config

__all__ = ["config"]
