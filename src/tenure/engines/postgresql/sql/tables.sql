-- Tables of the store.
--
-- An owner is a request whose order id is at most `last_owner` of its queue: a grant moves that
-- mark, and writes nothing else that is indexed.

CREATE SEQUENCE :schema.order_ids CACHE 1;
CREATE SEQUENCE :schema.session_ids CACHE 1;

CREATE TABLE :schema.meta (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    version integer NOT NULL,
    serves integer NOT NULL,                 -- the oldest version of programs that may use it
    epoch text NOT NULL,                     -- another one after each loss of data
    server text NOT NULL,                    -- system identifier and timeline of the data
    place oid NOT NULL,                      -- of this table: another one after a dump and restore
    relaxed boolean NOT NULL DEFAULT false,  -- some program has committed without the disk
    synchronous boolean NOT NULL DEFAULT false,  -- a promoted standby has lost nothing
    longest_window double precision NOT NULL DEFAULT 0,
    quarantined_until timestamptz NOT NULL DEFAULT 'epoch',
    quarantine_reason text NOT NULL DEFAULT ''
);

-- A copy of `meta`. A crash, a promotion or the recovery of a backup empties an unlogged table. So a
-- missing row says that data may have been lost.
CREATE UNLOGGED TABLE :schema.witness (
    epoch text NOT NULL,
    place oid NOT NULL,
    relaxed boolean NOT NULL,
    quarantined_until timestamptz NOT NULL
);

CREATE TABLE :schema.nodes (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    path text COLLATE "C" NOT NULL UNIQUE,
    config text NOT NULL
);

CREATE TABLE :schema.sessions (
    id bigint PRIMARY KEY,
    node integer NOT NULL,
    token text COLLATE "C" NOT NULL,         -- of its attachment: "<attach number>.<secret>"
    channel text COLLATE "C" NOT NULL,       -- of its engine; empty while detached
    seen timestamptz NOT NULL,               -- the last sign of life
    recovery_window double precision NOT NULL,
    liveness text NOT NULL,
    key bytea NOT NULL,
    description text NOT NULL,
    change_number bigint NOT NULL DEFAULT 0, -- the last change that was made, and its answer
    change_answer text NOT NULL DEFAULT ''
) WITH (fillfactor = 60, autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX sessions_of_node ON :schema.sessions (node, id);
CREATE UNIQUE INDEX sessions_by_token ON :schema.sessions (token);

-- Attachments from which a session was taken, and the time until which they may hold leases.
CREATE TABLE :schema.former (
    session bigint NOT NULL,
    token text COLLATE "C" NOT NULL,
    until timestamptz NOT NULL,
    PRIMARY KEY (session, token)
);

-- Semaphores. An ephemeral one exists while it has requests; its row stays for a while.
CREATE TABLE :schema.queues (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    node integer NOT NULL,
    name text COLLATE "C" NOT NULL,
    max_count numeric,                       -- the limit; null: ephemeral
    data bytea NOT NULL DEFAULT '',
    held numeric NOT NULL DEFAULT 0,
    whole boolean NOT NULL DEFAULT false,    -- one owner has all of the limit
    owners integer NOT NULL DEFAULT 0,
    waiters integer NOT NULL DEFAULT 0,
    last_owner bigint NOT NULL DEFAULT 0,
    data_changes bigint NOT NULL DEFAULT 0,
    owner_changes bigint NOT NULL DEFAULT 0,
    watched_until timestamptz NOT NULL DEFAULT 'epoch',
    watch_channel text NOT NULL DEFAULT '',
    UNIQUE (node, name)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);

CREATE TABLE :schema.requests (
    queue bigint NOT NULL,
    order_id bigint NOT NULL,
    session bigint NOT NULL,
    request_id bigint NOT NULL,
    count numeric NOT NULL,
    data bytea NOT NULL,
    joined_at timestamptz NOT NULL,
    granted_at timestamptz,
    deadline timestamptz,
    PRIMARY KEY (queue, order_id)
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02);
CREATE UNIQUE INDEX requests_of_session ON :schema.requests (session, request_id);

-- Requests that left their queues without a call of their sessions, until these have noticed.
CREATE TABLE :schema.removals (
    session bigint NOT NULL,
    request_id bigint NOT NULL,
    order_id bigint NOT NULL,
    reason text NOT NULL,
    PRIMARY KEY (session, request_id)
);

-- Rates, while they have tokens in their windows, and for a while longer. All times are microseconds.
CREATE TABLE :schema.rates (
    node integer NOT NULL,
    name text COLLATE "C" NOT NULL,
    max_count bigint NOT NULL DEFAULT 0,     -- the limit
    per bigint NOT NULL DEFAULT 0,
    burst bigint NOT NULL DEFAULT 0,
    time_window bigint NOT NULL DEFAULT 0,
    seen bigint NOT NULL DEFAULT 0,          -- the latest change
    check_at bigint NOT NULL DEFAULT 0,      -- when to see whether it is over
    times bigint[] NOT NULL DEFAULT '{}',
    counts bigint[] NOT NULL DEFAULT '{}',
    PRIMARY KEY (node, name)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX rates_by_check ON :schema.rates (check_at);
