"""The identity of a request to Ray, for the calls that it makes to other deployments."""

from __future__ import annotations

import contextvars
import dataclasses
import uuid

from ray import _raylet
from ray.serve import context

__all__ = ["OwnRequest"]


class OwnRequest:
    """A copy of the current request, under an id of its own. What runs in its `context` makes calls that Ray does not
    cancel when the client of the current request leaves: a stream needs them until it ends. Create it in the request's
    task.

    Ray has no public name for this. Ray's own tests do the same.
    """

    def __init__(self) -> None:
        self._id = str(uuid.uuid4())
        self.context = contextvars.copy_context()
        own = dataclasses.replace(
            context._get_serve_request_context(),
            _internal_request_id=self._id,
            cancel_on_parent_request_cancel=True,  # lists its calls, for `cancel_calls`
        )
        self.context.run(context._serve_request_context.set, own)
        self.context.run(_raylet.async_task_id.set, None)  # Ray cancels all calls of the task with this id

    def cancel_calls(self) -> None:
        """Cancel the calls that run, as Ray does for a request whose client has left."""
        for task in list(context._get_requests_pending_assignment(self._id).values()):
            task.get_loop().call_soon_threadsafe(task.cancel)
        for call in list(context._get_in_flight_requests(self._id).values()):
            call.cancel()
