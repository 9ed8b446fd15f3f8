"""The log store in Redis or Valkey, which many servers share.

Each stream is written by one server, which has its lease. When that server dies, its lease of all streams runs out, and
the others take its streams over. Any server can show, stop and delete any stream.

`_redis_keys.py` says which keys there are, `_scripts.py` what is changed in one step, `_connection.py` how Redis is
reached, `_members.py` which servers live, `stream_states.py` what a stream is to a server, `_openings.py` what becomes
of streams whose opening failed, `_inventory.py` how a server finds out what Redis has lost, `_writer.py` how events are
committed, `_lookup.py` how streams are found, `_follower.py` how those of other servers are followed, `_orphans.py` how
those of dead ones are taken, `redis_store.py` puts them together, `shared_log.py` what extensions keep.
"""

from __future__ import annotations

from tailrace.streams.opening import SharedStore

__all__ = ["STORE"]

STORE = SharedStore("redis", opens="tailrace_outer.redis.redis_store:open_with_settings")
