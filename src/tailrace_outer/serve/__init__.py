"""Write your own streaming deployment: `from tailrace import serve` replaces `from ray import serve`.

Rule: this code runs in the user's process, beside the user's code, and never touches client connections.
`tailrace_outer.apps` starts such processes and passes requests to them.
"""

from tailrace_outer.serve.batching import Batch, Member, batch
from tailrace_outer.serve.context import get_batch_request_contexts, get_request_context
from tailrace_outer.serve.deployment import Application, Deployment, deployment
from tailrace_outer.serve.handles import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator
from tailrace_outer.serve.ingress import ingress
from tailrace_outer.serve.options import BackpressureConfig
from tailrace_outer.serve.running import get_app_handle, get_deployment_handle, run, shutdown, start
from tailrace_outer.serve.stream import resumable, stream

__all__ = [
    "Application",
    "BackpressureConfig",
    "Batch",
    "Deployment",
    "DeploymentHandle",
    "DeploymentResponse",
    "DeploymentResponseGenerator",
    "Member",
    "batch",
    "deployment",
    "get_app_handle",
    "get_batch_request_contexts",
    "get_deployment_handle",
    "get_request_context",
    "ingress",
    "resumable",
    "run",
    "shutdown",
    "start",
    "stream",
]
