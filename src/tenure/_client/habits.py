"""Sentences for names and arguments that users of other locks type first.

`Handle` looks here when an attribute is missing, the acquiring methods when an argument is unknown,
and the packages when a name is missing. The error is Python's own, with a sentence that names the
form of tenure, so that `hasattr` and `except AttributeError` work as usual.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tenure.errors import Misuse

_RENEWED = (
    "a lease is renewed for as long as it is held; recovery_window= of client.session() bounds "
    "how long it outlives its program"
)
_LEASE = "lease = {await}{this}.{acquires}(), then {await}lease.release(); or {async}with {this}:"
_HELD = "lease.held is true while the lease is held"
_BLOCK = "write {async}with {connect}(url) as client:"

_ACQUIRED = {
    "acquire": _LEASE,
    "lock": _LEASE,
    "release": "release the lease that {acquires}() returned, or write {async}with {this}:",
    "unlock": "release the lease that {acquires}() returned, or write {async}with {this}:",
    "owned": f"{_HELD}; {{await}}{{this}}.describe() reads the store",
    "is_acquired": f"{_HELD}; {{await}}{{this}}.describe() reads the store",
    "acquired": f"{_HELD}; {{await}}{{this}}.describe() reads the store",
    "is_locked": f"{_HELD}; {{await}}{{this}}.describe() reads the store",
    "locked": "{await}{this}.describe() has the numbers held and waiting",
    "get_owner_id": "{await}{this}.describe(owners=True) names the holders",
    "contenders": "{await}{this}.describe(owners=True, waiters=True) lists them",
    "lease_holders": "{await}{this}.describe(owners=True) lists them",
    "cancel": "a wait is cancelled with its task, or ends with timeout=",
    "break_lock": "{await}client.evict(path, name, order_id) takes a request out of its queue",
    "reset": "{await}client.evict(path, name, order_id) takes a request out of its queue",
    **dict.fromkeys(("extend", "reacquire", "renew", "refresh", "heartbeat"), _RENEWED),
}
_MUTEX = "write client.mutex(name): {async}with client.mutex(name):"
_SEMAPHORE = "write client.semaphore(name, limit=4): {async}with client.semaphore(name, limit=4):"
_MAKES = {
    **dict.fromkeys(("lock", "Lock", "get_lock", "FileLock", "acquire"), _MUTEX),
    "RLock": (
        "write {recipes}.ReentrantMutex(client, name), whose lease a caller passes to its callees"
    ),
    **dict.fromkeys(("Mutex", "release", "set"), _MUTEX),
    **dict.fromkeys(("Semaphore", "get_semaphore", "BoundedSemaphore"), _SEMAPHORE),
    "Election": "write client.election(name)",
    **dict.fromkeys(
        ("ReadLock", "WriteLock", "RWLock", "read_lock", "write_lock"),
        "write {recipes}.RWLock(client, name)",
    ),
    **dict.fromkeys(("start", "open", "connect"), f"it connects on first use; or {_BLOCK}"),
    **dict.fromkeys(("stop", "close", "aclose", "disconnect"), "write {await}client.{close}()"),
}
_ATTRIBUTES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "Mutex": ("a mutex", _ACQUIRED),
    "Semaphore": ("a semaphore", _ACQUIRED),
    "Rate": (
        "a rate",
        {
            **dict.fromkeys(("acquire", "hit", "consume", "wait"), "write {await}rate.take(n)"),
            **dict.fromkeys(("try_acquire", "test", "allow"), "write {await}rate.try_take(n)"),
            **dict.fromkeys(("describe", "get_window_stats"), "write {await}rate.peek()"),
        },
    ),
    "Client": ("a client", _MAKES),
    "Session": (
        "a session",
        _MAKES | dict.fromkeys(("stop", "close", "aclose"), "write {await}session.{close}()"),
    ),
    "Election": (
        "an election",
        dict.fromkeys(
            ("acquire", "lock", "run", "elect", "lead"),
            "write {async}with election.campaign(data) as leadership:",
        ),
    ),
    "Lease": (
        "a lease",
        {
            **dict.fromkeys(("extend", "reacquire", "renew", "refresh", "heartbeat"), _RENEWED),
            **dict.fromkeys(("owned", "locked", "is_acquired", "acquired", "is_locked"), _HELD),
            **dict.fromkeys(("close", "aclose", "unlock"), "write {await}lease.release()"),
            "acquire": "it is acquired; write {async}with lease:",
            "token": "lease.fencing_token is the number of the grant",
            "local": "lease.fencing_token is the number of the grant",
            "ttl": f"lease.deadline is proven so far; {_RENEWED}",
        },
    ),
}

_NO_WAIT = "{instead} does not wait, and returns None"
_LIMIT = "a semaphore's size is limit="
_URL = "connect() takes one URL, such as redis://localhost:6379 or sqlite:///jobs.db"
_NO_POLLING = "the store grants requests in their order, without polling"
_DATA = "data= describes the holder, and lease.fencing_token is the number of the grant"
_ARGUMENTS = {
    **dict.fromkeys(("blocking", "block", "fail_when_locked", "non_blocking"), _NO_WAIT),
    **dict.fromkeys(("blocking_timeout", "acquire_timeout", "max_wait"), "timeout= of {waits}"),
    **dict.fromkeys(
        ("ttl", "expire", "expires", "lease", "lease_time", "auto_renewal", "lifetime"), _RENEWED
    ),
    "timeout": f"give it to {{waits}}, as the time to wait; {_RENEWED}",
    **dict.fromkeys(
        ("sleep", "poll_interval", "check_interval", "poll_intervall", "delay"), _NO_POLLING
    ),
    **dict.fromkeys(("token", "id", "identifier", "owner"), _DATA),
    **dict.fromkeys(("value", "max_leases", "permits", "size", "maxsize"), _LIMIT),
    "thread_local": "any task and thread may use a lease",
    "strict": "a semaphore's limit is always kept",
    **dict.fromkeys(("shared", "read"), "tenure.recipes has RWLock, for readers and writers"),
    **dict.fromkeys(("host", "port", "db", "password", "username", "hosts", "path"), _URL),
}
_INSTEAD = {
    "lock": ("try_lock()", "lock()"),
    "try_lock": ("try_lock() itself", "lock()"),
    "acquire": ("try_acquire()", "acquire()"),
    "try_acquire": ("try_acquire() itself", "acquire()"),
    "mutex": ("try_lock()", "lock()"),
    "semaphore": ("try_acquire()", "acquire()"),
    "take": ("try_take()", "take()"),
    "try_take": ("try_take() itself", "take()"),
    "rate": ("try_take()", "take()"),
}


def missing_attribute(handle: object, name: str, *, sync: bool) -> AttributeError:
    """Return the error for an attribute that a handle does not have."""
    cls = type(handle).__name__
    what, sentences = _ATTRIBUTES.get(cls, ("", {}))
    text = f"{cls!r} object has no attribute {name!r}"
    if name in sentences:
        advice = sentences[name].format_map(_words(sync=sync, this=cls.lower()))
        text = f"{what} has no {name}: {advice}"
    return AttributeError(text, name=name, obj=handle)


def not_a_block(handle: object) -> Misuse:
    """Return the error for entering an object of which a method returns the block."""
    method = _BLOCKS.get(type(handle).__name__, "one of its methods")
    return Misuse(f"{handle!r} is not entered itself: enter what {method} returns")


_BLOCKS = {"Election": "campaign()", "RWLock": "read() or write()", "ServiceRegistry": "register()"}


def unknown_argument(method: str, names: Iterable[str]) -> TypeError:
    """Return the error for keyword arguments that a method does not have."""
    name = next(iter(names))
    instead, waits = _INSTEAD.get(method, ("", ""))
    advice = _ARGUMENTS.get(name, "").format(instead=instead, waits=waits)
    text = f"{method}() got an unexpected keyword argument {name!r}"
    return TypeError(f"{text}: {advice}" if advice else text)


def missing_name(package: str, name: str) -> AttributeError:
    """Return the error for a name that a package does not have."""
    sync = package != "tenure"
    text = f"module {package!r} has no attribute {name!r}"
    advice = _MAKES.get(name) or _MAKES.get(name.capitalize())
    if name in _PACKAGE_NAMES and advice is not None:
        words = _words(sync=sync, this="client")
        text = f"{text}: after client = {words['connect']}(url), {advice.format_map(words)}"
    return AttributeError(text, name=name)


_PACKAGE_NAMES = {
    *("lock", "Lock", "RLock", "FileLock", "RWLock", "BoundedSemaphore"),
    *("mutex", "semaphore", "election", "get_lock", "acquire", "ReadLock", "WriteLock"),
}


def _words(*, sync: bool, this: str) -> dict[str, str]:
    return {
        "await": "" if sync else "await ",
        "async": "" if sync else "async ",
        "close": "close" if sync else "aclose",
        "connect": "tenure.blocking.connect" if sync else "tenure.connect",
        "recipes": "tenure.blocking.recipes" if sync else "tenure.recipes",
        "this": this,
        "acquires": "acquire" if this == "semaphore" else "lock",
    }
