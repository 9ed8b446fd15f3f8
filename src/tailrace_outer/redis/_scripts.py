"""What is changed in one step: Lua scripts, which Redis runs without anything between.

Every change of a stream checks the epoch of its writer in the same step. So a server whose streams were taken over
cannot write them, whatever it believes and however late its command arrives.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

__all__ = [
    "APPEND",
    "CLAIM",
    "COMPACT",
    "DECLARE_DEAD",
    "DELETE",
    "DELETE_UNANSWERED",
    "LIST_IN_TOPIC",
    "LOAD",
    "MISSING",
    "NEW_EPOCH",
    "OPEN",
    "OTHER_WRITER",
    "READ_LEASES",
    "RECALL",
    "RENEW",
    "STOP",
    "TAKE",
    "UNLIST",
    "UNLIST_IN_TOPIC",
    "Script",
    "script",
]  # fmt: skip


class Script(NamedTuple):
    """A script, and the name under which Redis knows it."""

    text: str
    sha: str


def script(text: str) -> Script:
    return Script(text, hashlib.sha1(text.encode()).hexdigest())  # noqa: S324  # the name that Redis gives it


OTHER_WRITER = -1  # another server writes this stream
MISSING = -2  # Redis does not have this stream

# Keys: `of_opening`. Arguments: epoch, record, owner, model, stream id, its position in `owned`. Returns 1; 0 if this
# came too late: there is such a stream of another epoch, or it has ended and was deleted, or DELETE_UNANSWERED has a
# later position. A stream that is opened once more gets the later position. Lists the server: Redis may have lost that
# it was there, and then it may die before it knows.
OPEN = script("""
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if epoch then
  if epoch ~= ARGV[1] then return 0 end
  local at = redis.call('ZSCORE', KEYS[4], ARGV[5])
  if at and tonumber(at) < tonumber(ARGV[6]) then redis.call('ZADD', KEYS[4], ARGV[6], ARGV[5]) end
  return 1
end
local gone = redis.call('GET', KEYS[3])
local deleted = gone and tonumber(string.match(gone, '^%z(%d+)$'))
if gone and not (deleted and deleted < tonumber(ARGV[6])) then return 0 end
redis.call('DEL', KEYS[2], KEYS[3])
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'record', ARGV[2], 'owner', ARGV[3], 'model', ARGV[4], 'last', 0)
redis.call('ZADD', KEYS[4], ARGV[6], ARGV[5])
redis.call('SADD', KEYS[5], ARGV[1])
return 1
""")

# Keys: `base` of the shard, which the names of all other keys begin with: few arguments are sent and read much faster
# than many. Arguments: epoch, retention in ms, time of tombstones in ms; msgpack with, for each stream, its id, the
# number of its first new event, that of the last, whether that is terminal, and how many bytes its events have; then
# the events of all streams. Only what follows the last event of a stream is added. Returns pairs for those streams
# where that was not possible: position in the call, and the number of the last event, OTHER_WRITER or MISSING.
APPEND = script("""
local failed, at = {}, 1
for i, row in ipairs(cmsgpack.unpack(ARGV[4])) do
  local stream, events = KEYS[1] .. 'stream:' .. row[1], KEYS[1] .. 'events:' .. row[1]
  local has = redis.call('HMGET', stream, 'epoch', 'last')
  local found
  if not has[1] then
    found = -2
  elseif has[1] ~= ARGV[1] then
    found = -1
  elseif tonumber(has[2]) ~= row[2] - 1 then
    found = tonumber(has[2])
  else
    local last = string.format('%.0f', row[3])
    redis.call('XADD', events, last .. '-0', 'e', string.sub(ARGV[5], at, at + row[5] - 1))
    redis.call('HSET', stream, 'last', last)
    if row[4] then
      redis.call('HSET', stream, 'ended', 1)
      redis.call('PEXPIRE', stream, ARGV[2])
      redis.call('PEXPIRE', events, ARGV[2])
      redis.call('SET', KEYS[1] .. 'gone:' .. row[1], redis.call('HGET', stream, 'owner'), 'PX', ARGV[3])
    end
  end
  if found then
    failed[#failed + 1] = i - 1
    failed[#failed + 1] = found
  end
  at = at + row[5]
end
return failed
""")

# Keys: `of_stream`. Returns [owner, epoch, 1 if it has ended, record, rows], [owner] for a tombstone, or [].
LOAD = script("""
local has = redis.call('HMGET', KEYS[1], 'owner', 'epoch', 'ended', 'record', 'events')
if not has[2] then
  local owner = redis.call('GET', KEYS[3])
  return owner and {owner} or {}
end
local rows = {}
if has[5] then
  rows[1] = has[5]
else
  for i, entry in ipairs(redis.call('XRANGE', KEYS[2], '-', '+')) do rows[i] = entry[2][2] end
end
return {has[1], has[2], has[3] or '0', has[4], rows}
""")

# Keys: `of_opening`. Arguments: epoch of the dead server, epoch of this one, stream id, its position in `owned`.
# Returns [record, rows, how often it was taken over without a new event since, 1 if it was to be stopped]; nil if it
# has ended and was compacted, or belongs to another server; 0 if this server has had it and lost it under the same
# epoch: it was declared dead, and gets a new epoch as soon as it knows. One that this server has taken already is
# returned again, since it may have got no reply. Lists this server, as OPEN does.
TAKE = script("""
local has = redis.call('HMGET', KEYS[1], 'epoch', 'ended', 'record', 'last', 'taken_at', 'takes', 'stop', 'events')
if has[8] or (has[1] ~= ARGV[1] and has[1] ~= ARGV[2]) then return false end
if has[1] ~= ARGV[2] then
  if redis.call('HGET', KEYS[1], 'lost:' .. ARGV[2]) then return 0 end
  redis.call('HSET', KEYS[1], 'lost:' .. has[1], 1)
end
local takes = 0
if not has[2] then takes = has[5] == has[4] and tonumber(has[6]) + 1 or 1 end
redis.call('HSET', KEYS[1], 'epoch', ARGV[2], 'taken_at', has[4], 'takes', takes)
redis.call('ZADD', KEYS[4], ARGV[4], ARGV[3])
redis.call('SADD', KEYS[5], ARGV[2])
local rows = {}
for i, entry in ipairs(redis.call('XRANGE', KEYS[2], '-', '+')) do rows[i] = entry[2][2] end
return {has[3], rows, takes, has[7] or '0'}
""")

# Keys: `of_owned`. Arguments: epoch, record and events of the stream in one row each, stream id, number of the last
# event, retention in ms, time of tombstones in ms. Ends the stream again if Redis has lost that.
COMPACT = script("""
redis.call('ZREM', KEYS[4], ARGV[4])
local has = redis.call('HMGET', KEYS[1], 'epoch', 'ended', 'owner')
if has[1] ~= ARGV[1] then return end
redis.call('HSET', KEYS[1], 'record', ARGV[2], 'events', ARGV[3])
redis.call('DEL', KEYS[2])
if not has[2] then
  redis.call('HSET', KEYS[1], 'ended', 1, 'last', ARGV[5])
  redis.call('PEXPIRE', KEYS[1], ARGV[6])
  redis.call('SET', KEYS[3], has[3], 'PX', ARGV[7])
end
""")

# Keys: `of_stream`. Asks for the end of a stream. Returns the epoch of its writer; nil if it has ended or is missing.
STOP = script("""
local has = redis.call('HMGET', KEYS[1], 'epoch', 'ended')
if not has[1] or has[2] then return false end
redis.call('HSET', KEYS[1], 'stop', 1)
return has[1]
""")

# Keys: `of_stream`. Arguments: epoch of this server, which gives the id of the stream to a client. Returns 1; 0 if
# there is no such stream.
RECALL = script("""
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'recalled', ARGV[1])
return 1
""")

# Keys: `of_owned`. Arguments: epoch, stream id, the next position in `owned`, time of tombstones in ms. Deletes a
# stream of this server that nobody writes. An OPEN that is still on its way then does nothing: perhaps nobody is left
# to find that stream. If an OPEN with a later position was faster, this does nothing. A stream that somebody knows goes
# on: then this returns the epoch of the server that gave its id to a client, or that of this server if it has events or
# was taken over: a TAKE may have got no reply.
DELETE_UNANSWERED = script("""
local at = redis.call('ZSCORE', KEYS[4], ARGV[2])
if at and tonumber(at) > tonumber(ARGV[3]) then return false end
local has = redis.call('HMGET', KEYS[1], 'epoch', 'recalled', 'last', 'events', 'takes')
if has[1] == ARGV[1] and not has[4] then
  if has[2] then return has[2] end
  if has[3] ~= '0' or has[5] then return ARGV[1] end
  redis.call('DEL', KEYS[1], KEYS[2])
end
redis.call('ZREM', KEYS[4], ARGV[2])
local gone = redis.call('GET', KEYS[3])
if not redis.call('HGET', KEYS[1], 'epoch') and (not gone or string.byte(gone) == 0) then
  redis.call('SET', KEYS[3], '\\0' .. ARGV[3], 'PX', ARGV[4])
end
return false
""")

# Keys: `of_owned`. Arguments: epoch, stream id, time of tombstones in ms. Deletes a stream that has ended, also one of
# this server whose end Redis has lost: nobody would write that again. Returns 1; 0 if another server writes it.
DELETE = script("""
redis.call('ZREM', KEYS[4], ARGV[2])
local has = redis.call('HMGET', KEYS[1], 'epoch', 'ended', 'owner')
if not has[1] then return 1 end
if not has[2] then
  if has[1] ~= ARGV[1] then return 0 end
  redis.call('SET', KEYS[3], has[3], 'PX', ARGV[3])
end
redis.call('DEL', KEYS[1], KEYS[2])
return 1
""")

# Keys: `claim`. Arguments: the rows of a stream that is not stored yet, that runs and that has ended; the row of
# another one, which it may replace; how long in ms the key is kept; 1, 2 or 3: which row. A row of the stream is not
# replaced by an earlier one: a command may be late, and a server may hear too late that it has lost the stream. Returns
# the row of another stream; nil if the key is this one's.
CLAIM = script("""
local has, which = redis.call('GET', KEYS[1]), tonumber(ARGV[6])
for row = math.min(which + 1, 3), 3 do
  if has == ARGV[row] then return false end
end
if has and has ~= ARGV[1] and has ~= ARGV[2] and has ~= ARGV[4] then return has end
redis.call('SET', KEYS[1], ARGV[which], 'PX', ARGV[5])
return false
""")

# Keys: `topic`. Arguments: when the stream began, its id, how long in ms the topic is kept, how many streams it has at
# most. Lists a stream there.
LIST_IN_TOPIC = script("""
redis.call('ZADD', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
""")

# Keys: `topic`. Arguments: id of a stream that has ended, how long in ms it is kept. If it is the last one it stays
# listed, as ended, for this time, or while earlier ones run.
UNLIST_IN_TOPIC = script("""
local is_last = redis.call('ZREVRANGE', KEYS[1], 0, 0)[1] == ARGV[1]
local began = redis.call('ZSCORE', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[1], ARGV[1])
if is_last then
  for _, other in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
    if string.sub(other, 1, 1) == '!' then redis.call('ZREM', KEYS[1], other) end
  end
  redis.call('ZADD', KEYS[1], began, '!' .. ARGV[1])
end
local rest = redis.call('ZRANGE', KEYS[1], 0, -1)
if #rest == 1 and string.sub(rest[1], 1, 1) == '!' then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 1
""")

# Keys: `epoch`. Returns a new epoch. It is larger than the earlier ones even if Redis has lost them: the clock goes on.
NEW_EPOCH = script("""
local now = redis.call('TIME')
local epoch = math.max(tonumber(redis.call('GET', KEYS[1]) or '0') + 1, now[1] * 1000 + math.floor(now[2] / 1000))
redis.call('SET', KEYS[1], string.format('%.0f', epoch))
return epoch
""")

# Keys: `owned` of a dead server, `writers` of its shard. Arguments: its epoch. Unlists it there, unless it has streams.
UNLIST = script("""
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('SREM', KEYS[2], ARGV[1]) end
return 1
""")

# Keys: `lease`. Arguments: ms. Returns the time of Redis, seconds and microseconds; nil if other servers have declared
# this one dead.
RENEW = script("""
if redis.call('GET', KEYS[1]) == 'dead' then return false end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[1])
return redis.call('TIME')
""")

# Keys: `lease` of several servers. Returns their values. Shortens a lease that would last longer than its duration.
# This happens if Redis's clock was set back, or if a promoted replica's clock is behind.
READ_LEASES = script("""
local leases = {}
for i, key in ipairs(KEYS) do
  leases[i] = redis.call('GET', key)
  local ms = tonumber(leases[i])
  if ms and redis.call('PTTL', key) > ms then redis.call('PEXPIRE', key, ms) end
end
return leases
""")

# Keys: `lease`. Declares a server dead whose lease has run out. Returns 1 if it is dead.
DECLARE_DEAD = script("""
local lease = redis.call('GET', KEYS[1])
if lease and lease ~= 'dead' then return 0 end
redis.call('SET', KEYS[1], 'dead')
return 1
""")
