"""Description of the JSON API, in OpenAPI 3.1."""

from __future__ import annotations

from typing import Any

from tenure import __version__

Schema = dict[str, Any]


def _or_null(kind: str, about: str = "") -> Schema:
    return {"type": [kind, "null"]} | ({"description": about} if about else {})


def _object(about: str, **fields: Schema) -> Schema:
    return {
        "type": "object",
        "description": about,
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


def _list(name: str) -> Schema:
    return {"type": "array", "items": {"$ref": f"#/components/schemas/{name}"}}


def _text(about: str) -> Schema:
    return {"type": "string", "description": about}


def _integer(about: str) -> Schema:
    return {"type": "integer", "description": about}


DATA = {
    "data": _or_null(
        "string", "The data as text, if it is valid UTF-8; at most 4,096 bytes of it."
    ),
    "data_base64": _or_null("string", "The data in base64, if it is no text."),
    "data_bytes": _integer("The length of the data in bytes."),
}
PROCESS = {
    "pid": _or_null("integer", "The process."),
    "host": _or_null("string", "The machine."),
    "program": _or_null("string", "The program."),
}
SEMAPHORE = {
    "name": _text("The name."),
    "kind": {
        "enum": ["mutex", "semaphore", "election", "config", "service"],
        "description": "The primitive that uses it, as far as the store shows it.",
    },
    "limit": _or_null("integer", "The limit; null: none."),
    "held": _or_null("integer", "The sum of the owners' counts; null: all."),
    "waiting": _or_null("integer", "The number of waiters."),
    "ephemeral": {"type": "boolean", "description": "Whether it exists only while it is in use."},
    **DATA,
}
PARTY = {
    "session_id": _integer("The session."),
    "session_description": _or_null("string", "The description of the session."),
    **PROCESS,
    "attached": _or_null("boolean", "Whether its program is connected."),
    "silent_for": _or_null("number", "Seconds since the last contact of the session."),
    "remaining": _or_null("number", "Seconds until its session expires unless it is renewed."),
    "since": _or_null("number", "Seconds since its wait began; of a holder: its oldest lease."),
    "leases": {
        "type": "array",
        "description": "The leases that it is inside; of a holder: those that others wait for.",
        "items": _object(
            "A lease.",
            name=_text("The semaphore."),
            order_id=_integer("Its fencing token."),
        ),
    },
}

SCHEMAS: dict[str, Schema] = {
    "Store": _object(
        "The store, as the observer has seen it.",
        url=_text("Its URL, without secrets."),
        trouble=_or_null("string", "Why it does not answer, or grants nothing."),
        visitor=_text("The identity of the reader."),
        semaphores=_integer("Number of semaphores."),
        held=_integer("Number of semaphores that have an owner."),
        waiting=_integer("Number of waiters."),
        complete={"type": "boolean", "description": "Whether the whole store has been read."},
        round_seconds={"type": "number", "description": "Duration of the last complete reading."},
    ),
    "Node": _object(
        "A node.",
        path=_text("The path."),
        sessions=_or_null("integer", "Number of sessions."),
        semaphores=_or_null("integer", "Number of semaphores."),
    ),
    "Semaphore": _object("A semaphore.", **SEMAPHORE),
    "SemaphoreWithRequests": _object(
        "A semaphore with its first owners and waiters.",
        node=_text("The node."),
        **SEMAPHORE,
        owners=_list("Request"),
        owners_following=_or_null("integer", "Where /requests continues; null: these are all."),
        waiters=_list("Request"),
        waiters_following=_or_null("integer", "Where /requests continues; null: these are all."),
    ),
    "Request": _object(
        "An owner or a waiter. Null means unknown.",
        order_id=_integer("Its place in the queue, and its fencing token."),
        count=_or_null("integer", "Number of tokens; null: all."),
        **DATA,
        since=_or_null("number", "Seconds since the grant; of a waiter: since it joined."),
        timeout=_or_null("number", "Seconds until a waiter times out."),
        remaining=_or_null("number", "Seconds until its session expires unless it is renewed."),
        session_id=_integer("The session."),
        session_description=_or_null("string", "The description of the session."),
        **PROCESS,
    ),
    "Session": _object(
        "A session. Null means unknown.",
        id=_integer("The id."),
        node=_text("The node."),
        description=_text("The description that its program gave."),
        recovery_window={
            "type": "number",
            "description": "Seconds for which it survives without contact.",
        },
        attached=_or_null("boolean", "Whether its program is connected."),
        silent_for=_or_null("number", "Seconds since its last contact."),
        **PROCESS,
    ),
    "Event": _object(
        "A change that the observer has seen.",
        number=_integer("Rises with each event, until the server restarts."),
        time={"type": "number", "description": "Seconds since the Unix epoch."},
        what=_text("The kind of change."),
        node=_text("The node."),
        name=_or_null("string", "The semaphore."),
        program=_or_null("string", "The program of the request."),
        order_id=_or_null("integer", "The request."),
        lasted=_or_null("number", "Seconds for which the request had waited or owned."),
        detail=_or_null("string", "The new data or limit."),
    ),
    "TimelineRequest": _object(
        "A request in the last minutes. Times are seconds since the Unix epoch.",
        order_id=_integer("Its place in the queue, and its fencing token."),
        session_id=_integer("The session."),
        program=_text("The program of the session."),
        count=_or_null("integer", "Number of tokens; null: all."),
        joined=_or_null("number", "The time at which it joined the queue, where known."),
        granted=_or_null("number", "The time of its grant, where known."),
        ended=_or_null("number", "The time at which it left the queue; null: it is there."),
    ),
    "WaitingTask": _object(
        "A task that waits inside leases, or for several tokens. Null means unknown.",
        name=_text("The semaphore that it waits for."),
        order_id=_integer("The request that waits."),
        task=_text("The name of the task."),
        timeout={"type": "boolean", "description": "Whether the wait has a timeout."},
        raises={"type": "boolean", "description": "Whether its session raises deadlocks."},
        left_out=_integer("Number of leases that are missing in `leases`."),
        deadlock=_or_null("integer", "The deadlock that it is a part of; null: of none."),
        awaited={
            "type": "array",
            "description": "The first tasks and holders that it waits for.",
            "items": _object(
                "A task or a holder.",
                session_id=_integer("The session."),
                order_id=_or_null("integer", "The request of a task that waits; null: a holder."),
            ),
        },
        **PARTY,
    ),
    "Holder": _object("A holder of whose tasks no wait is known. Null means unknown.", **PARTY),
    "Error": _object(
        "An error.",
        error=_object(
            "The error.",
            kind=_text("The name of the exception, or HTTP."),
            message=_text("What failed, why, and what to do."),
        ),
    ),
}

NODE = ("node", "string", "The node; without it /default, or the first that you may read.", False)
NAME = ("name", "string", "The semaphore.", True)
SEARCH = ("search", "string", "Only items that contain this text.", False)
LIMIT = ("limit", "integer", "Items on a page, 1 to 500; without it 50.", False)
AFTER_NAME = ("after", "string", "The `following` of the page before.", False)
AFTER_NUMBER = ("after", "integer", "The `following` of the page before.", False)
FOLLOWING_NAME = _or_null("string", "The `after` of the next page; null at the end.")
FOLLOWING_NUMBER = _or_null("integer", "The `after` of the next page; null at the end.")

Parameter = tuple[str, str, str, bool]


def _response(about: str, schema: Schema) -> Schema:
    return {"description": about, "content": {"application/json": {"schema": schema}}}


UNSUPPORTED = {
    "501": _response("The store does not show it.", {"$ref": "#/components/schemas/Error"})
}
ERRORS = {
    "400": _response("An argument is invalid.", {"$ref": "#/components/schemas/Error"}),
    "401": _response("The token is missing or not valid.", {"$ref": "#/components/schemas/Error"}),
    "403": _response("The identity may not do this.", {"$ref": "#/components/schemas/Error"}),
    "404": _response("There is no such object.", {"$ref": "#/components/schemas/Error"}),
    "503": _response("The store does not answer.", {"$ref": "#/components/schemas/Error"}),
}


def _get(
    identifier: str,
    about: str,
    schema: Schema,
    *parameters: Parameter,
    errors: Schema = ERRORS,
) -> Schema:
    return {
        "get": {
            "operationId": identifier,
            "summary": about,
            "parameters": [
                {
                    "name": name,
                    "in": "query",
                    "description": text,
                    "required": required,
                    "schema": {"type": kind},
                }
                for name, kind, text, required in parameters
            ],
            "responses": {"200": _response(about, schema), **errors},
        }
    }


def _post(identifier: str, about: str, sent: Schema, schema: Schema) -> Schema:
    return {
        "post": {
            "operationId": identifier,
            "summary": about,
            "requestBody": {"required": True, "content": {"application/json": {"schema": sent}}},
            "responses": {
                "200": _response(about, schema),
                **ERRORS,
                "415": _response("The body is no JSON.", {"$ref": "#/components/schemas/Error"}),
            },
        }
    }


def _reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


WAITS = {
    "node": _text("The node."),
    "time": {"type": "number", "description": "When it was read, in seconds since the Unix epoch."},
    "complete": {"type": "boolean", "description": "Whether everything was read."},
    "tasks": _list("WaitingTask"),
    "holders": _list("Holder"),
    "deadlocks": _integer("Number of deadlocks; `deadlock` of their tasks is from 1 to this."),
    "tasks_left_out": _integer("Number of further tasks."),
    "holders_left_out": _integer("Number of further holders."),
}

PATHS: dict[str, Schema] = {
    "/store": _get("getStore", "The store in brief.", _reference("Store")),
    "/nodes": _get(
        "listNodes",
        "The next nodes, by path.",
        _object("A page of nodes.", nodes=_list("Node"), following=FOLLOWING_NAME),
        AFTER_NAME,
        LIMIT,
    ),
    "/semaphores": _get(
        "listSemaphores",
        "The next semaphores of a node, by name.",
        _object(
            "A page of semaphores.",
            node=_text("The node."),
            semaphores=_list("Semaphore"),
            following=FOLLOWING_NAME,
        ),
        NODE,
        SEARCH,
        AFTER_NAME,
        LIMIT,
    ),
    "/semaphore": _get(
        "getSemaphore",
        "One semaphore with its first owners and waiters.",
        _reference("SemaphoreWithRequests"),
        NODE,
        NAME,
        LIMIT,
    ),
    "/requests": _get(
        "listRequests",
        "The next owners or waiters of a semaphore, by order id.",
        _object(
            "A page of requests.",
            node=_text("The node."),
            name=_text("The semaphore."),
            role={"enum": ["owners", "waiters"]},
            requests=_list("Request"),
            following=FOLLOWING_NUMBER,
        ),
        NODE,
        NAME,
        ("role", "string", "owners or waiters.", True),
        AFTER_NUMBER,
        LIMIT,
    ),
    "/requests/evict": _post(
        "evict",
        "Take one request out of its queue; needs administer.",
        _object(
            "The request.",
            node=_text("The node."),
            name=_text("The semaphore."),
            order_id=_integer("The request."),
        ),
        _object(
            "The outcome.",
            evicted={"type": "boolean", "description": "False: it was not there."},
            node=_text("The node."),
            name=_text("The semaphore."),
            order_id=_integer("The request."),
        ),
    ),
    "/sessions": _get(
        "listSessions",
        "The next sessions of a node, by id.",
        _object(
            "A page of sessions.",
            node=_text("The node."),
            sessions=_list("Session"),
            following=FOLLOWING_NUMBER,
        ),
        NODE,
        SEARCH,
        AFTER_NUMBER,
        LIMIT,
    ),
    "/sessions/end": _post(
        "endSession",
        "End a session like an expiry; needs administer.",
        _object("The session.", node=_text("The node."), session_id=_integer("The session.")),
        _object(
            "The outcome.",
            ended={"type": "boolean", "description": "False: it did not exist."},
            node=_text("The node."),
            session_id=_integer("The session."),
        ),
    ),
    "/events": _get(
        "listEvents",
        "The latest changes that the observer has seen, the newest first; at most 200.",
        _object("Events.", events=_list("Event")),
        ("node", "string", "Only events of this node.", False),
        ("name", "string", "Only events of this semaphore.", False),
        ("after", "integer", "Only events with a greater number.", False),
    ),
    "/timeline": _get(
        "getTimeline",
        "The requests of a semaphore in the last five minutes, as far as the observer saw them.",
        _object(
            "A timeline.",
            node=_text("The node."),
            name=_text("The semaphore."),
            requests=_list("TimelineRequest"),
        ),
        NODE,
        NAME,
    ),
    "/waits": _get(
        "getWaits",
        "The tasks of a node that wait inside leases, as the observer has read them.",
        _object("The waits of a node, those of deadlocks first; at most 200 tasks.", **WAITS),
        NODE,
        errors=ERRORS | UNSUPPORTED,
    ),
    "/why": _get(
        "getWhy",
        "Why the waiters of a semaphore wait, down to the holders at the root.",
        _object(
            "The chain of waits.",
            name=_text("The semaphore."),
            owners=_list("Request"),
            waiters=_list("Request"),
            **WAITS,
        ),
        NODE,
        NAME,
        LIMIT,
        errors=ERRORS | UNSUPPORTED,
    ),
    "/deadlocks": _get(
        "listDeadlocks",
        "The deadlocks of a node, or of all nodes, as the observer has read them.",
        _object(
            "Deadlocks.",
            deadlocks={
                "type": "array",
                "items": _object(
                    "Tasks that wait for each other, the oldest wait first.",
                    node=_text("The node."),
                    tasks=_list("WaitingTask"),
                    tasks_left_out=_integer("Number of further tasks."),
                ),
            },
            complete={"type": "boolean", "description": "Whether everything was read."},
        ),
        ("node", "string", "Only those of this node.", False),
        errors=ERRORS | UNSUPPORTED,
    ),
}


def description(base: str) -> Schema:
    """Return the description of the API.

    Args:
        base: the path under which it is served.
    """
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tenure",
            "version": __version__,
            "description": "Nodes, semaphores, sessions, waits and recent changes of one store.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": base}],
        "security": [{"token": []}],
        "paths": PATHS,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }
