"""What apps with a Hugging Face model import: `tailrace_outer.serve.huggingface`."""

from tailrace_outer.serve.huggingface import *  # noqa: F403
from tailrace_outer.serve.huggingface import __all__ as __all__
