"""What stands between a call of the model and a tool, as the tool's `config` asks for it.

A call passes the stations in this order; those that `config` does not name are not there, and the
call of a tool that names none goes straight on.

    slot of the request (max_parallel_calls)
      |
    cache ............. has the answer, or waits for an equal call that is under way
      |
    circuit breaker ... open: `unavailable`, at once
      |
    retry  <--------+.. behind a crash or a time-out: pause, then the whole rest again
      |             |
    gate            |.. isolation: process: the calls of one request, one after another
      |             |
    max_concurrency |.. a place among all requests
      |             |
    rate_limit      |.. a time among all requests
      |             |
    circuit breaker |.. it may have opened meanwhile; counts how the attempt ends
      |             |
    execute --------+.. timeout_s starts here, for each attempt

So a cached answer takes nobody's place and is given also while the service is down; nobody queues
for a service that is down; a call that pauses holds no place; and no time-out runs in a queue.
Whatever a station holds it gives back when the call ends, fails or is cancelled.

One guard serves all requests of a rank: it is kept for each tool object and event loop.
"""

from agentrl.tools.guard.path import UnavailableError, Visit, way_of

__all__ = ["UnavailableError", "Visit", "way_of"]
