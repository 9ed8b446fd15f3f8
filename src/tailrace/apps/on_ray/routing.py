"""Routing of requests to replicas."""

from __future__ import annotations

import random
from hashlib import blake2b

from ray.serve.request_router import LocalityMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

__all__ = ["SessionRouter"]


class SessionRouter(LocalityMixin, RequestRouter):  # type: ignore[misc]  # mypy does not see Ray's types
    """Sends all requests of a session, which the header X-Session-Id names, to one replica: it has the beginning of the
    conversation in its prefix cache. While that replica has a queue, and without a session, the less busy one of two
    random replicas gets the request, of those on this machine first.

    The replica of a session is found by rendezvous hashing. So all proxies agree, and a new replica takes over only its
    share.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas in the order in which Ray tries them."""
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        near = [by_id[one] for one in self.apply_locality_routing(pending_request) if one in by_id]
        groups = [random.sample(near, min(2, len(near)))] if near else []
        session_id = pending_request.metadata.session_id if pending_request is not None else ""
        if session_id and by_id:
            preferred = max(candidate_replicas, key=lambda replica: _weight(session_id, replica.replica_id))
            if not preferred.routing_stats.get("waiting"):
                groups.insert(0, [preferred])
        return groups


def _weight(session_id: str, replica_id: ReplicaID) -> bytes:
    return blake2b(f"{session_id}\0{replica_id.unique_id}".encode(), digest_size=8).digest()
