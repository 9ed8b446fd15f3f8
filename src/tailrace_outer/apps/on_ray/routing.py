"""Routing of requests to replicas."""

from __future__ import annotations

import random
from hashlib import blake2b

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

__all__ = ["SessionRouter"]


class SessionRouter(RequestRouter):  # type: ignore[misc]  # mypy does not see Ray's types
    """Sends all requests of a session, which the header X-Session-Id names, to one replica: it has the beginning of the
    conversation in its prefix cache. Other requests go to the less busy one of two random replicas. Replicas with a
    queue are avoided.

    The replica of a session is found by rendezvous hashing. So all proxies agree, and a new replica takes over only its
    share. Ray's own router prefers replicas on the proxy's machine; here an idle engine elsewhere is better.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas in the order in which Ray tries them."""
        if not candidate_replicas:
            return []
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # wait between two rounds in which all are full
        free = [replica for replica in candidate_replicas if not replica.routing_stats.get("waiting")]
        others = random.sample(free or candidate_replicas, min(2, len(free or candidate_replicas)))
        session_id = pending_request.metadata.session_id if pending_request is not None else ""
        if not session_id:
            return [others, candidate_replicas]
        preferred = max(candidate_replicas, key=lambda replica: _weight(session_id, replica.replica_id))
        first = [[preferred]] if preferred in free or not free else []
        return [*first, others, candidate_replicas]


def _weight(session_id: str, replica_id: ReplicaID) -> bytes:
    return blake2b(f"{session_id}\0{replica_id.unique_id}".encode(), digest_size=8).digest()
