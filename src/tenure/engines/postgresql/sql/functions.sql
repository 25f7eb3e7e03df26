-- Functions of the store. Each call is one transaction of one round trip.
--
-- Rules:
--   * A row is read for a decision, or written, only after this transaction has locked it, or the row
--     that stands for it: requests belong to their queue's row. Each statement sees what was
--     committed before it, so a row that is looked for again by its name may be another one. A
--     statement that has to wait for a lock uses what the row contains then. Of other rows it sees
--     what was committed before; so it may use those of the caller's own requests alone.
--   * An operation of a session holds FOR KEY SHARE on its row, which a renewal does not wait for.
--     The end of a session and a new attachment hold FOR UPDATE, which a renewal skips: it must not
--     wait for what they wait for.
--   * The tables that may be written, or that are read after the lock of a row, are locked before all
--     rows. So a transaction that waits for VACUUM FULL holds no row. And REINDEX keeps out the writers
--     of a table while it waits for its readers: one that reads first and writes later would be in a
--     deadlock with it. The beginning of a quarantine is the exception.
--   * INSERT ... ON CONFLICT names no index, so that those of REINDEX CONCURRENTLY count too.
--   * What another engine must know is sent with NOTIFY; what the caller must know is in the answer.
--   * Statements over lists look expensive to the planner, which knows no statistics of a list. They
--     are not compiled, and the frequent ones use indexes, behind a pooler too. They are not planned
--     again for each list.
--   * Times are those of clock_timestamp(). A time that lies in the future, because the clock was
--     set back, counts as now.
--
-- There is no deadlock, because a transaction waits only for rows that come after all that it holds:
--
--   1. nodes, by id: attaching shares one, and its drop holds it alone;
--   2. sessions, by id;
--   3. new queues, by node and name, as long as their inserts are not committed;
--   4. queues, by id;
--   5. `meta`: the next order id after a jump, the longest window, a quarantine.
--
--   * Nothing waits for a request: what a transaction guards is skipped, and tried again later.
--   * `tick` inserts queues first. It skips sessions that are locked, and queues that are to be removed.
--   * A quarantine begins before all other locks, with those of all sessions before `meta`. What
--     finds one in between grants nothing: see `calm`.
--   * A guard holds the rows of requests, and waits for the end of a transaction that removes one. If
--     it guards several leases, it may wait while it holds others, for which nothing waits.

-- The server and the database of the data, and their timeline.
CREATE OR REPLACE FUNCTION :schema.server_name() RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT (SELECT system_identifier FROM pg_control_system()) || '.'
        || (SELECT oid FROM pg_database WHERE datname = current_database()) || '/'
        || left(pg_walfile_name(pg_current_wal_lsn()), 8)
$$;

-- One row if requests may be granted and this transaction commits as durably as it must. A look at it
-- takes no locks, so it may come after some.
CREATE OR REPLACE VIEW :schema.calm AS
    SELECT true AS calm FROM :schema.witness
    WHERE place = ':schema.meta'::regclass AND quarantined_until < clock_timestamp()
        AND current_setting('transaction_isolation') IN ('read committed', 'read uncommitted')
        AND (relaxed OR current_setting('synchronous_commit') NOT IN ('off', 'local'));

-- Seconds for which nothing is granted; 0 outside a quarantine. It begins one after a loss of data,
-- which the name of the server shows too, to a program that connects.
-- The transaction's commit waits for the disk and the synchronous standbys unless a crash would begin
-- one, whatever the account's or the server's setting is.
CREATE OR REPLACE FUNCTION :schema.quarantine(
    connects boolean DEFAULT false
) RETURNS double precision
LANGUAGE plpgsql AS $$
DECLARE
    m :schema.meta;
    lost text;
    name text;
    ids bigint[];
BEGIN
    IF NOT connects AND EXISTS (SELECT FROM :schema.calm) THEN
        RETURN 0;
    ELSIF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE 'transactions are %', current_setting('transaction_isolation')
            USING ERRCODE = 'TN004', HINT = 'The functions need READ COMMITTED.';
    END IF;
    SELECT x.* INTO m FROM :schema.meta x JOIN :schema.witness w ON w.epoch = x.epoch
        WHERE x.place = ':schema.meta'::regclass
            AND (NOT connects OR x.server = :schema.server_name());
    IF m.relaxed IS NOT TRUE AND current_setting('synchronous_commit') IN ('off', 'local') THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    IF m.quarantined_until < clock_timestamp() THEN
        RETURN 0;
    ELSIF m.quarantined_until <= clock_timestamp() + make_interval(secs => m.longest_window) THEN
        RETURN extract(epoch FROM m.quarantined_until - clock_timestamp());
    ELSIF pg_current_xact_id_if_assigned() IS NOT NULL THEN  -- `turn_over`, for example, has locks
        RAISE 'a quarantine begins before all locks' USING ERRCODE = 'TN001';  -- it is sent again
    END IF;
    ids := array(SELECT id FROM :schema.sessions ORDER BY id FOR NO KEY UPDATE);
    UPDATE :schema.meta  -- if the clock was set back
        SET quarantined_until = clock_timestamp() + make_interval(secs => longest_window)
        WHERE quarantined_until > clock_timestamp() + make_interval(secs => longest_window);
    SELECT * INTO m FROM :schema.meta FOR UPDATE;
    IF NOT FOUND THEN
        RAISE 'the table :schema.meta has lost its row' USING ERRCODE = 'TN005',
            HINT = 'End the programs that use the store, and drop the schema';
    END IF;
    name := :schema.server_name();
    IF m.place <> ':schema.meta'::regclass OR m.server <> name
            OR NOT EXISTS (SELECT FROM :schema.witness w WHERE w.epoch = m.epoch) THEN
        IF split_part(name, '/', 1) <> split_part(m.server, '/', 1)
                OR m.place <> ':schema.meta'::regclass
                OR name <> m.server AND NOT m.synchronous THEN
            lost := CASE m.server WHEN '' THEN 'the database was restored, or rows were deleted in it'
                ELSE 'the database was restored, or another server was promoted' END;
        ELSIF m.relaxed THEN
            lost := 'the server crashed, and durability=process is in use';
        END IF;
        IF lost IS NOT NULL THEN
            m.quarantined_until := clock_timestamp() + make_interval(secs => m.longest_window);
            -- Tokens that were lost are lower, although this server's clock may be behind.
            PERFORM setval(':schema.order_ids', (1e6 * (1 + m.longest_window) + greatest(
                nextval(':schema.order_ids'), extract(epoch FROM clock_timestamp()) * 1e6))::bigint);
            m.epoch := md5(random()::text || clock_timestamp()::text);
            UPDATE :schema.sessions SET seen = clock_timestamp() WHERE id = ANY (ids);
        END IF;
        UPDATE :schema.meta SET epoch = m.epoch, server = name, place = ':schema.meta'::regclass,
            quarantine_reason = coalesce(lost, quarantine_reason),
            quarantined_until = m.quarantined_until;
    END IF;
    DELETE FROM :schema.witness;
    INSERT INTO :schema.witness SELECT epoch, place, relaxed, quarantined_until FROM :schema.meta;
    RETURN greatest(0, extract(epoch FROM m.quarantined_until - clock_timestamp()));
END $$;

-- Lock the tables before all rows; answers the seconds for which nothing is granted.
CREATE OR REPLACE FUNCTION :schema.lock_tables(relaxed boolean DEFAULT false) RETURNS double precision
LANGUAGE plpgsql AS $$
BEGIN
    LOCK TABLE :schema.meta, :schema.witness, :schema.nodes, :schema.sessions, :schema.former,
        :schema.queues, :schema.requests, :schema.removals IN ROW EXCLUSIVE MODE;
    IF relaxed THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    RETURN :schema.quarantine();
END $$;

-- For an administrator who has restored the data of a stopped server, which nothing else shows.
CREATE OR REPLACE FUNCTION :schema.data_was_restored() RETURNS void
LANGUAGE sql AS $$
    LOCK TABLE :schema.meta, :schema.witness IN ROW EXCLUSIVE MODE;
    UPDATE :schema.meta SET server = '';
    DELETE FROM :schema.witness;
$$;

-- Rows that are needed were deleted, but not by these functions: what was granted may be forgotten. So
-- the next function begins a quarantine. The row of `meta` comes back.
CREATE OR REPLACE FUNCTION :schema.note_loss() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    m :schema.meta;
BEGIN
    IF TG_WHEN = 'BEFORE' THEN  -- `meta` is truncated
        SELECT * INTO m FROM :schema.meta;
        PERFORM set_config('tenure.lost_meta', to_json(m)::text, true);
        RETURN NULL;
    ELSIF TG_TABLE_NAME = 'meta' THEN
        IF TG_OP = 'DELETE' THEN
            m := OLD;
        ELSE
            m := json_populate_record(
                NULL:::schema.meta, current_setting('tenure.lost_meta')::json);
        END IF;
        IF m.version IS NOT NULL THEN
            INSERT INTO :schema.meta SELECT m.* ON CONFLICT DO NOTHING;
        END IF;
    ELSIF TG_TABLE_NAME = 'nodes' AND TG_OP = 'DELETE' THEN
        IF NOT EXISTS (SELECT FROM :schema.sessions WHERE node = OLD.id) THEN
            RETURN NULL;
        END IF;
    END IF;
    UPDATE :schema.meta SET server = '' WHERE server <> '';
    DELETE FROM :schema.witness;
    RETURN NULL;
END $$;

-- The next order id: above all before, above `above`, and near the clock's microseconds.
CREATE OR REPLACE FUNCTION :schema.next_order_id(above bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    id bigint;
    wall bigint := extract(epoch FROM clock_timestamp()) * 1e6;
BEGIN
    FOR attempt IN 1 .. 3 LOOP
        id := nextval(':schema.order_ids');
        IF id > above AND id > wall - 1000000 THEN
            RETURN id;
        ELSIF attempt = 1 THEN  -- most often, the transaction that has it moves the sequence now
            PERFORM FROM :schema.meta FOR UPDATE SKIP LOCKED;
        ELSIF attempt = 2 THEN
            PERFORM FROM :schema.meta FOR UPDATE;
        END IF;
    END LOOP;
    -- Others draw ids at the same time: it must not be set back below theirs.
    RETURN setval(':schema.order_ids', greatest(id + 1000000, above + 1, wall));
END $$;

CREATE OR REPLACE FUNCTION :schema.expired(s :schema.sessions) RETURNS boolean
LANGUAGE sql AS $$
    SELECT clock_timestamp() - s.seen > make_interval(secs => s.recovery_window)
$$;

-- What is wrong with a session for a holder of a token; null if nothing is.
CREATE OR REPLACE FUNCTION :schema.fault(s :schema.sessions, its_token text) RETURNS text
LANGUAGE sql AS $$
    SELECT CASE WHEN s.id IS NULL OR :schema.expired(s)
            OR NOT EXISTS (SELECT FROM :schema.nodes WHERE id = s.node) THEN '["gone"]'
        WHEN s.token <> its_token THEN '["taken"]' END
$$;

-- Report an event of a session: with NOTIFY, or as the result if its engine is the caller.
CREATE OR REPLACE FUNCTION :schema.report(of_session bigint, event text, caller text) RETURNS text[]
LANGUAGE plpgsql AS $$
DECLARE
    its text;
BEGIN
    SELECT channel INTO its FROM :schema.sessions WHERE id = of_session;
    IF its = caller THEN
        RETURN ARRAY[event];
    ELSIF left(its, 7) = 'tenure_' THEN
        PERFORM pg_notify(its, event);
    END IF;
    RETURN '{}';
END $$;

-- The time after so many microseconds; null for no limit.
CREATE OR REPLACE FUNCTION :schema.deadline(wait bigint) RETURNS timestamptz
LANGUAGE sql AS $$
    SELECT clock_timestamp() + make_interval(secs => wait / 1e6)
$$;

CREATE OR REPLACE FUNCTION :schema.fits(q :schema.queues, wanted numeric) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN q.whole THEN false
        WHEN wanted = coalesce(q.max_count, 18446744073709551615) THEN q.held = 0
        ELSE coalesce(q.max_count, 18446744073709551615) > 9007199254740991
            OR q.held + wanted <= q.max_count
    END
$$;

-- Delete a request, under the lock of its queue; the events, or null if a transaction guards it.
-- `why` is empty if its session has called for that.
CREATE OR REPLACE FUNCTION :schema.take_out(r :schema.requests, why text, caller text) RETURNS text[]
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM :schema.requests WHERE ctid = (
        SELECT ctid FROM :schema.requests WHERE queue = r.queue AND order_id = r.order_id
        FOR UPDATE SKIP LOCKED);
    IF NOT FOUND THEN
        RETURN NULL;
    ELSIF why = '' THEN
        RETURN '{}';
    END IF;
    INSERT INTO :schema.removals VALUES (r.session, r.request_id, r.order_id, why)
        ON CONFLICT DO NOTHING;
    RETURN :schema.report(
        r.session, why || ' ' || r.session || ' ' || r.request_id || ' ' || r.order_id, caller);
END $$;

-- The counters of a queue without a request.
CREATE OR REPLACE FUNCTION :schema.without(q :schema.queues, r :schema.requests) RETURNS :schema.queues
LANGUAGE plpgsql AS $$
BEGIN
    IF r.order_id > q.last_owner THEN
        q.waiters := q.waiters - 1;
    ELSE
        q.owners := q.owners - 1;
        q.held := q.held - r.count;
        q.whole := false;
    END IF;
    RETURN q;
END $$;

-- Grant to the waiters that fit, in order, save the queue, and notify its watchers: what has changed is
-- 'd' its data, 'o' its owners, 'b' both, '' neither. Answers the events.
CREATE OR REPLACE FUNCTION :schema.settle(
    q :schema.queues, changed text, frozen boolean, caller text
) RETURNS text[]
LANGUAGE plpgsql AS $$
DECLARE
    r :schema.requests;
    events text[] := '{}';
    more text[];
BEGIN
    WHILE q.waiters > 0 AND NOT frozen LOOP
        SELECT * INTO r FROM :schema.requests
            WHERE queue = q.id AND order_id > q.last_owner ORDER BY order_id LIMIT 1;
        IF NOT FOUND THEN
            q.waiters := 0;  -- rows were deleted by hand
            EXIT;
        ELSIF r.deadline <= clock_timestamp() THEN
            more := :schema.take_out(r, 't', caller);
            EXIT WHEN more IS NULL;
            events := events || more;
            q.waiters := q.waiters - 1;
            CONTINUE;
        END IF;
        EXIT WHEN NOT :schema.fits(q, r.count);
        UPDATE :schema.requests SET granted_at = clock_timestamp(), deadline = NULL
            WHERE queue = q.id AND order_id = r.order_id;
        q.held := q.held + r.count;
        q.whole := r.count = coalesce(q.max_count, 18446744073709551615);
        q.owners := q.owners + 1;
        q.waiters := q.waiters - 1;
        q.last_owner := r.order_id;
        changed := CASE WHEN changed IN ('b', 'd') THEN 'b' ELSE 'o' END;
        events := events || :schema.report(r.session,
            'g ' || r.session || ' ' || r.request_id || ' ' || r.order_id, caller);
        EXIT WHEN q.whole;
    END LOOP;
    IF q.max_count IS NULL AND q.owners + q.waiters = 0 THEN  -- the semaphore disappears
        changed := 'b';
    END IF;
    UPDATE :schema.queues SET held = q.held, whole = q.whole, owners = q.owners, waiters = q.waiters,
        last_owner = q.last_owner,
        data = CASE WHEN q.max_count IS NULL AND q.owners + q.waiters = 0 THEN '' ELSE data END,
        data_changes = data_changes + (changed IN ('d', 'b'))::integer,
        owner_changes = owner_changes + (changed IN ('o', 'b'))::integer
    WHERE id = q.id;
    IF changed <> '' AND q.watch_channel <> '' AND q.watched_until > clock_timestamp() THEN
        PERFORM pg_notify(q.watch_channel, changed);
    END IF;
    RETURN events;
END $$;

-- True if rows of a queue's requests, or of their sessions, were deleted, but not by these functions.
-- It is STABLE, so that it sees what the calling statement sees.
CREATE OR REPLACE FUNCTION :schema.damaged(q :schema.queues) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT count(*) FILTER (WHERE y.order_id <= q.last_owner) <> q.owners
        OR count(*) <> q.owners + q.waiters OR count(*) <> count(s.id)
    FROM :schema.requests y LEFT JOIN :schema.sessions s ON s.id = y.session
    WHERE y.queue = q.id
$$;

-- Have damaged queues among these, whose rows are locked, show what they may still grant. The holder of
-- a lost request, or of one whose session is lost, may not know. So a substitute session owns what is
-- missing, until the longest recovery window is over.
CREATE OR REPLACE FUNCTION :schema.mend(ids bigint[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    q :schema.queues;
    substitute bigint;
    there record;
    missing numeric;
BEGIN
    FOR q IN SELECT * FROM :schema.queues x WHERE x.id = ANY (ids) AND :schema.damaged(x) LOOP
        substitute := nextval(':schema.session_ids');
        UPDATE :schema.requests y SET session = substitute, request_id = y.order_id
            WHERE y.ctid = ANY (ARRAY(
                SELECT z.ctid FROM :schema.requests z WHERE z.queue = q.id AND NOT EXISTS (
                    SELECT FROM :schema.sessions s WHERE s.id = z.session)
                FOR UPDATE SKIP LOCKED));
        SELECT count(*) FILTER (WHERE y.order_id <= q.last_owner) AS owners,
            count(*) FILTER (WHERE y.order_id > q.last_owner) AS waiters,
            coalesce(sum(y.count) FILTER (WHERE y.order_id <= q.last_owner), 0) AS held
            INTO there FROM :schema.requests y WHERE y.queue = q.id;
        missing := CASE WHEN there.owners < q.owners THEN greatest(q.held - there.held, 1) ELSE 0 END;
        IF missing > 0 THEN
            INSERT INTO :schema.requests
            SELECT q.id, max(n), substitute, max(n), missing, '', clock_timestamp(), clock_timestamp(), NULL
            FROM generate_series(q.last_owner - q.owners, q.last_owner) n
            WHERE NOT EXISTS (
                SELECT FROM :schema.requests y WHERE y.queue = q.id AND y.order_id = n);
        END IF;
        INSERT INTO :schema.sessions
                (id, node, token, channel, seen, recovery_window, liveness, key, description)
            SELECT substitute, q.node, 'substitute.' || substitute, '', clock_timestamp(),
                greatest(longest_window, 1), 'process', '', 'a holder whose records were deleted'
            FROM :schema.meta;
        UPDATE :schema.queues SET owners = there.owners + (missing > 0)::integer,
            waiters = there.waiters, held = there.held + missing,
            whole = there.held + missing = coalesce(max_count, 18446744073709551615)
                AND there.owners + (missing > 0)::integer = 1
            WHERE id = q.id;
    END LOOP;
END $$;

-- The operations of sessions, in order.
--   sessions, tokens: in the order of the sessions' ids
--   origins, kinds, numbers, names: for each operation, the place of its session in these; "m" a mutex,
--     "e" enqueue, "E" enqueue, sent before, "w" withdraw; the number of its request; its semaphore
--   counts, contents, waits, ephemeral: each empty, or for each operation the count, or null for all of
--     the limit; the data in base64; microseconds to wait, or null; whether the semaphore is ephemeral.
--     The count of a withdrawal is the number of a request that it keeps, or null: one of the session
--     that has to be in the queue, and loses its timeout
--   fresh: the places of operations on ephemeral semaphores that may have no row yet
--   judged: the sessions that were reported as expired have been ended, as far as that is possible
-- Answers {"expired": [session or the negative number of a damaged queue, ...]} if nothing was done; or else a list: for each operation
-- the order id of an owner, [order id, that of the request directly ahead or 0] of a waiter, 0 if
-- refused or withdrawn, -1 if there was nothing to withdraw, -2 if a transaction guards the request,
-- ["unkept", why] if one that it keeps is missing, ["what is wrong", ...]; then events of the
-- caller's sessions.
CREATE OR REPLACE FUNCTION :schema.operate(
    caller text, highest bigint, relaxed boolean, sessions bigint[], tokens text[],
    origins integer[], kinds "char"[], numbers bigint[], names text[],
    counts numeric[] DEFAULT '{}', contents text[] DEFAULT '{}', waits bigint[] DEFAULT '{}',
    ephemeral boolean[] DEFAULT '{}', fresh integer[] DEFAULT '{}', judged boolean DEFAULT false
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off
    SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    everything CONSTANT numeric := 18446744073709551615;
    total CONSTANT integer := cardinality(kinds);
    left_of_quarantine double precision;
    frozen boolean := false;
    nodes integer[];  -- of the sessions, null of those that are refused
    locked bigint[];  -- the locked rows; a row that appears later is not used
    q :schema.queues;  -- the row in use, with changes that `settle` has yet to save
    changed text;  -- what they are; null if there are none
    vacated boolean := false;  -- among them, a request has left
    r :schema.requests;
    its_node integer;
    its_session bigint;
    number bigint;
    top numeric;
    near boolean;
    places bigint[];
    queues bigint[];
    order_ids bigint[];
    wanted numeric;
    there boolean;
    done boolean;
    ahead bigint;
    dead bigint[];
    damaged bigint[];
    answers text[];
    events text[] := '{}';
BEGIN
    LOCK TABLE :schema.meta, :schema.sessions, :schema.queues, :schema.requests, :schema.removals
        IN ROW EXCLUSIVE MODE;
    IF relaxed THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    PERFORM FROM :schema.calm;
    IF NOT FOUND THEN
        left_of_quarantine := :schema.quarantine();
        frozen := left_of_quarantine > 0;
    END IF;

    -- Locks: sessions, new queues, queues.
    FOR at IN 1 .. cardinality(sessions) LOOP
        SELECT s.node INTO its_node FROM :schema.sessions s
            WHERE s.id = sessions[at] AND s.token = tokens[at] AND NOT :schema.expired(s)
            FOR KEY SHARE;
        nodes[at] := its_node;
    END LOOP;
    IF fresh <> '{}' THEN
        INSERT INTO :schema.queues (node, name)
            SELECT DISTINCT nodes[origins[f]], names[f] FROM unnest(fresh) f
            WHERE nodes[origins[f]] IS NOT NULL
            ORDER BY 1, 2 ON CONFLICT DO NOTHING;
    END IF;

    -- A request that does not wait must not be refused because of an owner that has expired. This
    -- needs no locks: `expire` looks again.
    IF NOT judged AND 0 = ANY (waits) THEN
        SELECT array_agg(DISTINCT s.id) INTO dead
            FROM unnest(origins, names, waits) o (origin, name, wait)
            JOIN :schema.queues x ON x.node = nodes[o.origin] AND x.name = o.name
            JOIN :schema.requests y ON y.queue = x.id
            JOIN :schema.sessions s ON s.id = y.session
            WHERE o.wait = 0 AND x.owners + x.waiters > 0 AND :schema.expired(s);
        SELECT array_agg(DISTINCT -x.id) INTO damaged
            FROM unnest(origins, names, waits) o (origin, name, wait)
            JOIN :schema.queues x ON x.node = nodes[o.origin] AND x.name = o.name
            WHERE o.wait = 0 AND x.owners + x.waiters > 0 AND :schema.damaged(x);
        dead := dead || damaged;
        IF dead IS NOT NULL THEN
            RETURN '{"expired":[' || array_to_string(dead, ',') || ']}';
        END IF;
    END IF;

    IF names[1] = ALL (names) AND nodes[1] = ALL (nodes) THEN
        SELECT * INTO q FROM :schema.queues WHERE node = nodes[1] AND name = names[1]
            FOR NO KEY UPDATE;
        locked := array_fill(q.id, ARRAY[total]);
    ELSE
        -- All at once: locks, mutexes that are free, and releases that no request waits for, each
        -- the only operation on its queue.
        number := nextval(':schema.order_ids');
        near := NOT frozen
            AND number > greatest(highest, extract(epoch FROM clock_timestamp()) * 1e6 - 1000000);
        WITH o AS MATERIALIZED (
            SELECT e.at, sessions[e.origin] AS session, e.kind, e.number, x.id AS queue, x.owners,
                x.max_count, e.uses = 1 AND e.kept IS NULL AND x.waiters = 0 AND x.data = ''
                    AND x.watched_until < clock_timestamp() AS alone
            FROM (SELECT *, count(*) OVER (PARTITION BY u.name) AS uses
                FROM unnest(origins, kinds, numbers, names, counts) WITH ORDINALITY
                    u (origin, kind, number, name, kept, at)) e
            JOIN :schema.queues x ON x.node = nodes[e.origin] AND x.name = e.name
            ORDER BY x.id FOR NO KEY UPDATE OF x
        ), granted AS (
            INSERT INTO :schema.requests
            SELECT o.queue, nextval(':schema.order_ids'), o.session, o.number, everything, '',
                clock_timestamp(), clock_timestamp(), NULL
            FROM o WHERE o.kind = 'm' AND o.alone AND o.owners = 0 AND o.max_count IS NULL AND near
            RETURNING queue, order_id, count
        ), released AS (
            DELETE FROM :schema.requests WHERE ctid = ANY (ARRAY(
                SELECT y.ctid FROM o JOIN :schema.requests y
                    ON y.session = o.session AND y.request_id = o.number AND y.queue = o.queue
                WHERE o.kind = 'w' AND o.alone FOR UPDATE OF y SKIP LOCKED))
            RETURNING queue, 0::bigint AS order_id, -count AS count
        ), changed AS (
            SELECT * FROM granted UNION ALL SELECT * FROM released
        ), saved AS (
            UPDATE :schema.queues x SET held = x.held + c.count, whole = c.order_id > 0,
                owners = x.owners + CASE WHEN c.order_id > 0 THEN 1 ELSE -1 END,
                last_owner = greatest(x.last_owner, c.order_id),
                data_changes = data_changes + 1, owner_changes = owner_changes + 1
            FROM changed c WHERE x.id = c.queue
        )
        SELECT array_agg(o.at), array_agg(o.queue), array_agg(c.order_id)
            INTO places, queues, order_ids FROM o LEFT JOIN changed c ON c.queue = o.queue;
        FOR at IN 1 .. coalesce(cardinality(places), 0) LOOP
            locked[places[at]] := queues[at];
            answers[places[at]] := order_ids[at];
        END LOOP;
    END IF;

    FOR at IN 1 .. total LOOP
        CONTINUE WHEN answers[at] IS NOT NULL;
        its_session := sessions[origins[at]];
        number := numbers[at];
        IF nodes[origins[at]] IS NULL THEN
            answers[at] := CASE WHEN EXISTS (SELECT FROM :schema.sessions
                    WHERE id = its_session AND token <> tokens[origins[at]])
                THEN '["taken"]' ELSE '["gone"]' END;
            CONTINUE;
        END IF;
        IF q.id IS DISTINCT FROM locked[at]
                OR vacated AND (q.owners + q.waiters = 0 OR kinds[at] = 'E') THEN
            IF changed IS NOT NULL THEN
                events := events || :schema.settle(q, changed, frozen, caller);
                changed := NULL;
                vacated := false;
            END IF;
            SELECT * INTO q FROM :schema.queues WHERE id = locked[at];
        END IF;

        IF kinds[at] = 'w' THEN
            IF counts[at] IS NOT NULL THEN
                UPDATE :schema.requests SET deadline = NULL WHERE session = its_session
                    AND request_id = counts[at]::bigint AND queue = q.id;
                IF NOT FOUND THEN
                    answers[at] := '["unkept","' || coalesce((SELECT reason FROM :schema.removals
                        WHERE session = its_session AND request_id = counts[at]::bigint), '') || '"]';
                    CONTINUE;
                END IF;
            END IF;
            DELETE FROM :schema.requests WHERE ctid = (
                SELECT ctid FROM :schema.requests
                WHERE session = its_session AND request_id = number AND queue = q.id
                FOR UPDATE SKIP LOCKED) RETURNING * INTO r;
            IF FOUND THEN
                changed := CASE WHEN r.order_id > q.last_owner THEN coalesce(changed, '')
                    WHEN changed = 'b' THEN 'b' ELSE 'o' END;
                vacated := true;
                q := :schema.without(q, r);
                answers[at] := '0';
            ELSE
                answers[at] := coalesce((
                    SELECT CASE queue WHEN q.id THEN '-2' ELSE '["another name"]' END
                    FROM :schema.requests y WHERE session = its_session AND request_id = number
                        AND EXISTS (SELECT FROM :schema.queues x WHERE x.id = y.queue)), '-1');
                DELETE FROM :schema.removals WHERE session = its_session AND request_id = number;
            END IF;
            CONTINUE;
        ELSIF kinds[at] = 'E' THEN
            answers[at] := coalesce((
                SELECT CASE WHEN order_id <= q.last_owner
                    THEN order_id::text ELSE '[' || order_id || ']' END
                FROM :schema.requests
                WHERE session = its_session AND request_id = number AND queue = q.id), (
                SELECT '[' || order_id || ']' FROM :schema.removals
                WHERE session = its_session AND request_id = number));
            CONTINUE WHEN answers[at] IS NOT NULL;
        END IF;

        IF q.id IS NULL AND ephemeral[at] IS NOT FALSE THEN
            RAISE 'the semaphore has no row' USING ERRCODE = 'TN001';  -- sent again, as a fresh one
        END IF;
        wanted := coalesce(counts[at], everything);
        top := coalesce(q.max_count, everything);
        there := q.max_count IS NOT NULL OR q.owners + q.waiters > 0;
        answers[at] := CASE
            WHEN there IS NOT TRUE AND ephemeral[at] IS FALSE THEN '["missing"]'
            WHEN there AND (ephemeral[at] IS FALSE) = (q.max_count IS NULL)
                THEN '["kind",' || (q.max_count IS NULL)::integer || ']'
            WHEN wanted < 1 OR wanted > top OR wanted > 9007199254740991 AND wanted <> top
                THEN '["count",' || top || ']' END;
        CONTINUE WHEN answers[at] IS NOT NULL;
        done := NOT frozen AND q.waiters = 0 AND :schema.fits(q, wanted);
        IF NOT done AND NOT frozen AND (vacated OR waits[at] = 0) THEN  -- is it free after `settle`?
            IF vacated AND wanted < top OR EXISTS (SELECT FROM :schema.requests y
                    WHERE y.queue = q.id AND y.order_id > q.last_owner
                        AND y.deadline <= clock_timestamp()) THEN
                events := events || :schema.settle(q, coalesce(changed, ''), frozen, caller);
                changed := NULL;
                vacated := false;
                SELECT * INTO q FROM :schema.queues WHERE id = q.id;
                done := q.waiters = 0 AND :schema.fits(q, wanted);
            END IF;
        END IF;
        IF NOT done AND waits[at] = 0 THEN
            answers[at] := CASE WHEN frozen
                THEN '["quarantined",' || left_of_quarantine || ']' ELSE '0' END;
            CONTINUE;
        END IF;
        r.order_id := :schema.next_order_id(greatest(highest, q.last_owner));
        INSERT INTO :schema.requests VALUES (
            q.id, r.order_id, its_session, number, wanted,
            decode(coalesce(contents[at], ''), 'base64'),
            clock_timestamp(), CASE WHEN done THEN clock_timestamp() END,
            CASE WHEN NOT done THEN :schema.deadline(waits[at]) END)
            RETURNING (SELECT y.order_id FROM :schema.requests y
                WHERE y.queue = q.id ORDER BY y.order_id DESC LIMIT 1) INTO ahead;
        IF done THEN
            q.held := q.held + wanted;
            q.whole := wanted = top;
            q.owners := q.owners + 1;
            q.last_owner := r.order_id;
            answers[at] := r.order_id;
        ELSE
            q.waiters := q.waiters + 1;
            answers[at] := '[' || r.order_id || ',' || coalesce(ahead, 0) || ']';
        END IF;
        changed := CASE WHEN NOT there OR changed = 'b' THEN 'b'
            WHEN done OR changed = 'o' THEN 'o' ELSE '' END;
    END LOOP;
    IF changed IS NOT NULL THEN
        events := events || :schema.settle(q, changed, frozen, caller);
    END IF;
    IF events <> '{}' THEN
        answers := answers || ('"' || array_to_string(events, '","') || '"');
    END IF;
    RETURN '[' || array_to_string(answers, ',') || ']';
END $$;

-- Acquire one mutex as `operate` would, in a few short statements, if it is free, or has requests and
-- this one may wait. Anything else is left to `operate`.
CREATE OR REPLACE FUNCTION :schema.acquire(
    caller text, highest bigint, relaxed boolean, of_session bigint, its_token text,
    number bigint, its_name text, wait bigint
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    its_node integer;
    its_queue bigint;
    latest bigint;
    ahead bigint;
    answer bigint := nextval(':schema.order_ids');
BEGIN
    LOCK TABLE :schema.meta, :schema.sessions, :schema.queues, :schema.requests, :schema.removals
        IN ROW EXCLUSIVE MODE;
    IF relaxed THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    SELECT s.node INTO its_node FROM :schema.sessions s, :schema.calm
        WHERE s.id = of_session AND s.token = its_token AND NOT :schema.expired(s)
        FOR KEY SHARE OF s;
    IF answer > greatest(highest, extract(epoch FROM clock_timestamp()) * 1e6 - 1000000) THEN
        UPDATE :schema.queues x SET held = 18446744073709551615, whole = true, owners = 1,
            last_owner = answer, data_changes = x.data_changes + 1,
            owner_changes = x.owner_changes + 1
        WHERE x.node = its_node AND x.name = its_name AND x.owners = 0 AND x.waiters = 0
            AND x.max_count IS NULL AND x.data = '' AND x.watched_until < clock_timestamp()
            AND x.last_owner < answer  -- after it has waited for the row, too
        RETURNING x.id INTO its_queue;
    END IF;
    IF its_queue IS NULL THEN
        UPDATE :schema.queues x SET waiters = x.waiters + 1
            WHERE x.node = its_node AND x.name = its_name AND x.owners + x.waiters > 0
                AND x.max_count IS NULL AND wait IS DISTINCT FROM 0
            RETURNING x.id, x.last_owner INTO its_queue, latest;
        IF NOT FOUND THEN
            RETURN :schema.operate(caller, highest, relaxed, ARRAY[of_session], ARRAY[its_token],
                '{1}', '{m}', ARRAY[number], ARRAY[its_name], waits => ARRAY[wait]);
        END IF;
        answer := :schema.next_order_id(greatest(highest, latest));  -- the last one in the queue
    END IF;
    INSERT INTO :schema.requests VALUES (its_queue, answer, of_session, number, 18446744073709551615,
        '', clock_timestamp(), CASE WHEN latest IS NULL THEN clock_timestamp() END,
        CASE WHEN latest IS NOT NULL THEN :schema.deadline(wait) END)
        RETURNING CASE WHEN latest IS NOT NULL THEN (SELECT y.order_id FROM :schema.requests y
            WHERE y.queue = its_queue ORDER BY y.order_id DESC LIMIT 1) END INTO ahead;
    RETURN CASE WHEN latest IS NULL THEN '[' || answer || ']'
        ELSE '[[' || answer || ',' || coalesce(ahead, 0) || ']]' END;
END $$;

-- Release one lease in the same way, if no request waits for it, or if it is a mutex of which the first
-- waiter is to be the owner.
CREATE OR REPLACE FUNCTION :schema.release(
    caller text, highest bigint, relaxed boolean, of_session bigint, its_token text,
    number bigint, its_name text
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    its_queue bigint;
    waiting integer;
    latest bigint;
    its_row tid;
    its_count numeric;
    next_session bigint;
    next_number bigint;
    events text[];
BEGIN
    LOCK TABLE :schema.meta, :schema.sessions, :schema.queues, :schema.requests, :schema.removals
        IN ROW EXCLUSIVE MODE;
    IF relaxed THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    SELECT x.id, x.waiters, x.last_owner, y.ctid, y.count
        INTO its_queue, waiting, latest, its_row, its_count
        FROM :schema.calm, :schema.sessions s
        JOIN :schema.queues x ON x.node = s.node AND x.name = its_name
        JOIN :schema.requests y ON y.session = s.id AND y.request_id = number AND y.queue = x.id
            AND y.order_id <= x.last_owner
        WHERE s.id = of_session AND s.token = its_token AND NOT :schema.expired(s)
            AND x.data = '' AND x.watched_until < clock_timestamp()
            AND (x.waiters = 0 OR x.whole AND x.max_count IS NULL)
        FOR KEY SHARE OF s FOR NO KEY UPDATE OF x FOR UPDATE OF y SKIP LOCKED;
    IF waiting > 0 THEN
        UPDATE :schema.requests SET granted_at = clock_timestamp(), deadline = NULL
            WHERE queue = its_queue AND count = 18446744073709551615
                AND (deadline IS NULL OR deadline > clock_timestamp()) AND order_id = (
                    SELECT order_id FROM :schema.requests
                    WHERE queue = its_queue AND order_id > latest ORDER BY order_id LIMIT 1)
            RETURNING session, request_id, order_id INTO next_session, next_number, latest;
    END IF;
    IF NOT FOUND THEN
        RETURN :schema.operate(caller, highest, relaxed, ARRAY[of_session], ARRAY[its_token],
            '{1}', '{w}', ARRAY[number], ARRAY[its_name]);
    END IF;
    DELETE FROM :schema.requests WHERE ctid = its_row;
    IF waiting = 0 THEN
        UPDATE :schema.queues x SET held = x.held - its_count, whole = false,
            owners = x.owners - 1, data_changes = x.data_changes + 1,
            owner_changes = x.owner_changes + 1
        WHERE x.id = its_queue;
        RETURN '[0]';
    END IF;
    UPDATE :schema.queues x SET waiters = x.waiters - 1, last_owner = latest,
        owner_changes = x.owner_changes + 1
    WHERE x.id = its_queue;
    events := :schema.report(next_session,
        'g ' || next_session || ' ' || next_number || ' ' || latest, caller);
    IF events = '{}' THEN
        RETURN '[0]';
    END IF;
    RETURN '[0,"' || events[1] || '"]';
END $$;

-- Let requests of a session leave the queue of a mutex, of which it is the owner, and let others join
-- it, all at once, each with the microseconds that it may wait, or null. `kept` is empty, or has for
-- each that leaves the request that it keeps, or null. The order does not matter, because they are
-- other requests. Anything unusual is left to `operate`. Answers like it, first for all that leave.
CREATE OR REPLACE FUNCTION :schema.turn_over(
    caller text, highest bigint, relaxed boolean, of_session bigint, its_token text,
    its_name text, leaving bigint[], joining bigint[], waits bigint[], kept bigint[]
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off
    SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    many CONSTANT integer := cardinality(leaving);
    more CONSTANT integer := cardinality(joining);
    q :schema.queues;
    rows tid[];
    owned boolean;
    its_kept bigint;
    next_session bigint;
    next_number bigint;
    latest bigint;
    ahead bigint;
    order_ids bigint[];
    answers text := repeat(',0', many);
    events text[];
BEGIN
    LOCK TABLE :schema.meta, :schema.sessions, :schema.queues, :schema.requests, :schema.removals
        IN ROW EXCLUSIVE MODE;
    IF relaxed THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    SELECT x.* INTO q FROM :schema.calm, :schema.sessions s
        JOIN :schema.queues x ON x.node = s.node AND x.name = its_name
        WHERE s.id = of_session AND s.token = its_token AND NOT :schema.expired(s)
            AND x.whole AND x.max_count IS NULL
        FOR KEY SHARE OF s FOR NO KEY UPDATE OF x;
    IF nextval(':schema.order_ids') > greatest(highest, q.last_owner,
            extract(epoch FROM clock_timestamp()) * 1e6 - 1000000) THEN
        SELECT array_agg(y.ctid), bool_or(y.order_id <= q.last_owner) INTO rows, owned FROM (
            SELECT z.ctid, z.order_id FROM :schema.requests z
            WHERE z.session = of_session AND z.request_id = ANY (leaving) AND z.queue = q.id
            FOR UPDATE SKIP LOCKED) y;
    END IF;
    FOREACH its_kept IN ARRAY kept LOOP
        IF its_kept <> ALL (leaving) THEN
            UPDATE :schema.requests SET deadline = NULL
                WHERE session = of_session AND request_id = its_kept AND queue = q.id;
            owned := owned AND FOUND;
        END IF;
    END LOOP;
    IF owned IS NOT TRUE OR cardinality(rows) < many THEN
        RETURN :schema.operate(caller, highest, relaxed, ARRAY[of_session], ARRAY[its_token],
            array_fill(1, ARRAY[many + more]), array_fill('w'::"char", ARRAY[many])
                || array_fill('m'::"char", ARRAY[more]),
            leaving || joining, array_fill(its_name, ARRAY[many + more]),
            counts => kept::numeric[], waits => array_fill(NULL::bigint, ARRAY[many]) || waits);
    END IF;
    DELETE FROM :schema.requests WHERE ctid = ANY (rows);
    IF more > 0 THEN
        WITH joined AS (
            INSERT INTO :schema.requests
            SELECT q.id, nextval(':schema.order_ids'), of_session, number, 18446744073709551615, '',
                clock_timestamp(), NULL, :schema.deadline(wait)
            FROM unnest(joining, waits) j (number, wait) RETURNING order_id
        ) SELECT array_agg(order_id), (SELECT y.order_id FROM :schema.requests y
                WHERE y.queue = q.id ORDER BY y.order_id DESC LIMIT 1)
            INTO order_ids, ahead FROM joined;
        FOR at IN 1 .. more LOOP
            answers := answers || ',[' || order_ids[at] || ',' || coalesce(ahead, 0) || ']';
            ahead := order_ids[at];
        END LOOP;
    END IF;
    q.waiters := q.waiters - many + 1 + more;
    IF q.watched_until < clock_timestamp() THEN
        UPDATE :schema.requests SET granted_at = clock_timestamp(), deadline = NULL
            WHERE queue = q.id AND count = 18446744073709551615
                AND (deadline IS NULL OR deadline > clock_timestamp()) AND order_id = (
                    SELECT order_id FROM :schema.requests
                    WHERE queue = q.id AND order_id > q.last_owner ORDER BY order_id LIMIT 1)
            RETURNING session, request_id, order_id INTO next_session, next_number, latest;
    END IF;
    IF latest IS NOT NULL THEN
        UPDATE :schema.queues x SET waiters = q.waiters - 1, last_owner = latest,
            owner_changes = x.owner_changes + 1
        WHERE x.id = q.id;
        events := ARRAY['g ' || next_session || ' ' || next_number || ' ' || latest];
        IF next_session <> of_session THEN
            events := :schema.report(next_session, events[1], caller);
        END IF;
    ELSE
        q.owners := 0;
        q.held := 0;
        q.whole := false;
        events := :schema.settle(q, 'o', false, caller);
    END IF;
    IF events <> '{}' THEN
        answers := answers || ',"' || array_to_string(events, '","') || '"';
    END IF;
    RETURN '[' || substr(answers, 2) || ']';
END $$;

-- Renew sessions, [session, token, [request, ...]] each, with the requests that are considered owned,
-- and the negative numbers of those that are only in the queue. Answers the ids of those that live and
-- have them, or [id, number of a missing request, ...], without those whose rows are locked; or null
-- if data were lost since an epoch: then the sessions may have lost leases, and must be attached again.
-- While the tables of requests are rewritten, these are not looked for: nothing can be granted then.
CREATE OR REPLACE FUNCTION :schema.renew(relaxed boolean, who jsonb, its_epoch text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET plan_cache_mode = force_generic_plan SET jit = off SET enable_seqscan = off AS $$
DECLARE
    alive json;
    lacking jsonb;
BEGIN
    LOCK TABLE :schema.sessions IN ROW EXCLUSIVE MODE;
    IF relaxed THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    PERFORM :schema.quarantine();
    IF NOT EXISTS (SELECT FROM :schema.meta WHERE epoch = its_epoch) THEN
        RETURN NULL;
    END IF;
    BEGIN
        LOCK TABLE :schema.nodes, :schema.queues, :schema.requests IN ACCESS SHARE MODE NOWAIT;
        SELECT jsonb_object_agg(m.id, m.numbers) INTO lacking FROM (
            SELECT w ->> 0 AS id, jsonb_agg(abs(n::bigint)) AS numbers
            FROM jsonb_array_elements(who) w, jsonb_array_elements_text(w -> 2) n
            WHERE (SELECT n::bigint < 0 OR y.order_id <= x.last_owner  -- an index scan for each
                FROM :schema.requests y JOIN :schema.queues x ON x.id = y.queue
                WHERE y.session = (w ->> 0)::bigint AND y.request_id = abs(n::bigint)) IS NOT TRUE
            GROUP BY 1) m;
        who := (SELECT jsonb_agg(w) FROM jsonb_array_elements(who) w
            JOIN :schema.sessions s ON s.id = (w ->> 0)::bigint
            JOIN :schema.nodes n ON n.id = s.node);
    EXCEPTION WHEN lock_not_available THEN
        NULL;
    END;
    WITH locked AS MATERIALIZED (
        SELECT s.id FROM jsonb_array_elements(who) w JOIN :schema.sessions s
            ON s.id = (w ->> 0)::bigint AND s.token = w ->> 1
        FOR NO KEY UPDATE OF s SKIP LOCKED
    ), renewed AS (
        UPDATE :schema.sessions s SET seen = clock_timestamp() FROM locked
            WHERE s.id = locked.id AND NOT :schema.expired(s)
            RETURNING s.id
    ) SELECT json_agg(coalesce(to_jsonb(id) || (lacking -> id::text), to_jsonb(id)))
        INTO alive FROM renewed;
    RETURN coalesce(alive::text, '[]');
END $$;

-- End sessions whose rows are locked.
CREATE OR REPLACE FUNCTION :schema.end_sessions(dead bigint[], why text, caller text) RETURNS text[]
LANGUAGE plpgsql AS $$
DECLARE
    q :schema.queues;
    r :schema.requests;
    events text[] := '{}';
    owned boolean;
    frozen boolean := NOT EXISTS (SELECT FROM :schema.calm);
    each bigint;
BEGIN
    PERFORM FROM :schema.queues x
        WHERE x.id IN (SELECT y.queue FROM :schema.requests y WHERE y.session = ANY (dead))
        ORDER BY x.id FOR NO KEY UPDATE;
    -- A transaction that guards a request keeps its session.
    dead := array(SELECT unnest(dead) EXCEPT SELECT y.session FROM :schema.requests y
        WHERE y.session = ANY (dead) AND NOT EXISTS (
            SELECT FROM :schema.requests z WHERE z.ctid = y.ctid FOR UPDATE SKIP LOCKED));
    FOR q IN SELECT * FROM :schema.queues x
        WHERE x.id IN (SELECT y.queue FROM :schema.requests y WHERE y.session = ANY (dead))
    LOOP
        owned := false;
        FOR r IN SELECT * FROM :schema.requests y
            WHERE y.queue = q.id AND y.session = ANY (dead)
        LOOP
            owned := owned OR r.order_id <= q.last_owner;
            PERFORM :schema.take_out(r, '', caller);
            q := :schema.without(q, r);
        END LOOP;
        events := events || :schema.settle(q, CASE WHEN owned THEN 'o' ELSE '' END, frozen, caller);
    END LOOP;
    FOREACH each IN ARRAY dead LOOP
        IF why <> '' THEN
            events := events || :schema.report(each, 'E ' || each || ' ' || why, caller);
        END IF;
    END LOOP;
    DELETE FROM :schema.removals WHERE session = ANY (dead);
    DELETE FROM :schema.former WHERE session = ANY (dead);
    DELETE FROM :schema.sessions WHERE id = ANY (dead);
    RETURN events;
END $$;

-- Lock the sessions among some that have expired, unless another transaction is at them.
CREATE OR REPLACE FUNCTION :schema.lock_expired(candidates bigint[]) RETURNS bigint[]
LANGUAGE sql AS $$
    SELECT coalesce(array_agg(x.id), '{}') FROM (
        SELECT s.id FROM :schema.sessions s WHERE s.id = ANY (candidates) AND :schema.expired(s)
        ORDER BY s.id FOR UPDATE SKIP LOCKED) x
$$;

-- Expire sessions and requests in some queues, [node, name] each. With null, expire all sessions, and
-- remove the rows of ephemeral semaphores that are gone. Renews what is watched, [node, name, channel]
-- each. Writes nothing if nothing has expired. Answers {"due": seconds until an owner's session in
-- these queues expires, unless it is renewed, or a waiter of the caller does, "quarantine": seconds,
-- "why": its reason, "epoch": the epoch, "seen": the counters of each watched queue, "notifies": the
-- seconds for which its changes are notified from now on, at the least, "pollers": [programs that poll
-- for waiters, queues for which they poll] if the caller is one, "events": events}.
CREATE OR REPLACE FUNCTION :schema.tick(caller text, places jsonb, watched jsonb) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET jit = off SET enable_seqscan = off AS $$
DECLARE
    frozen double precision := :schema.lock_tables();
    queues bigint[];
    ids bigint[];
    q :schema.queues;
    r :schema.requests;
    events text[] := '{}';
    seen jsonb;
    notifies jsonb;
    due double precision;
    more text[];
    wanted bigint[];
    damaged bigint[];
    pollers jsonb;
BEGIN
    IF EXISTS (SELECT FROM jsonb_array_elements(watched) w JOIN :schema.nodes n ON n.path = w ->> 0
            LEFT JOIN :schema.queues x ON x.node = n.id AND x.name = w ->> 1 WHERE x.id IS NULL) THEN
        PERFORM FROM :schema.nodes WHERE path IN (
            SELECT w ->> 0 FROM jsonb_array_elements(watched) w) ORDER BY id FOR KEY SHARE;
        INSERT INTO :schema.queues (node, name)
            SELECT DISTINCT n.id, w ->> 1 FROM jsonb_array_elements(watched) w
                JOIN :schema.nodes n ON n.path = w ->> 0
            ORDER BY 1, 2 ON CONFLICT DO NOTHING;
    END IF;
    UPDATE :schema.sessions SET seen = clock_timestamp() WHERE id IN (
        SELECT id FROM :schema.sessions s WHERE s.seen > clock_timestamp() + interval '1 second'
        ORDER BY id FOR UPDATE SKIP LOCKED);
    queues := array(
        SELECT x.id FROM jsonb_array_elements(places) p JOIN :schema.queues x ON x.name = p ->> 1
            AND x.node = (SELECT id FROM :schema.nodes WHERE path = p ->> 0));
    IF places IS NULL THEN
        ids := array(SELECT id FROM :schema.sessions s WHERE :schema.expired(s));
    ELSE
        ids := array(SELECT s.id FROM :schema.requests y JOIN :schema.sessions s ON s.id = y.session
            WHERE y.queue = ANY (queues) AND :schema.expired(s));
    END IF;
    ids := :schema.lock_expired(ids);
    wanted := array(
        SELECT x.id FROM :schema.queues x WHERE x.id = ANY (queues) AND x.waiters > 0 AND (
            frozen = 0 AND (SELECT :schema.fits(x, y.count) FROM :schema.requests y
                WHERE y.queue = x.id AND y.order_id > x.last_owner ORDER BY y.order_id LIMIT 1)
            OR EXISTS (SELECT FROM :schema.requests y WHERE y.queue = x.id
                AND y.order_id > x.last_owner AND y.deadline <= clock_timestamp())));
    damaged := array(SELECT x.id FROM :schema.queues x
        WHERE (places IS NULL OR x.id = ANY (queues)) AND :schema.damaged(x));
    PERFORM FROM :schema.queues x WHERE x.id = ANY (wanted) OR x.id = ANY (damaged)
        OR x.id IN (SELECT y.queue FROM :schema.requests y WHERE y.session = ANY (ids))
        ORDER BY x.id FOR NO KEY UPDATE;
    IF damaged <> '{}' THEN
        PERFORM :schema.mend(damaged);
    END IF;
    IF ids <> '{}' THEN
        events := :schema.end_sessions(ids, 'it expired', caller);
    END IF;
    FOR q IN SELECT * FROM :schema.queues x WHERE x.id = ANY (wanted) AND x.waiters > 0 LOOP
        FOR r IN SELECT * FROM :schema.requests y
            WHERE y.queue = q.id AND y.order_id > q.last_owner AND y.deadline <= clock_timestamp()
        LOOP
            more := :schema.take_out(r, 't', caller);
            IF more IS NOT NULL THEN
                events := events || more;
                q := :schema.without(q, r);
            END IF;
        END LOOP;
        events := events || :schema.settle(q, '', frozen > 0, caller);
    END LOOP;
    IF watched IS NOT NULL THEN
        WITH due AS MATERIALIZED (
            SELECT x.id, w ->> 2 AS channel FROM jsonb_array_elements(watched) w
                JOIN :schema.queues x ON x.name = w ->> 1
                    AND x.node = (SELECT id FROM :schema.nodes WHERE path = w ->> 0)
                WHERE x.watched_until < clock_timestamp() + interval '45 seconds'
            FOR NO KEY UPDATE OF x SKIP LOCKED
        ) UPDATE :schema.queues x SET watched_until = clock_timestamp() + interval '90 seconds',
            watch_channel = due.channel FROM due WHERE x.id = due.id;
        SELECT jsonb_agg(jsonb_build_array(x.id, x.data_changes, x.owner_changes) ORDER BY w.at),
            jsonb_agg(greatest(0, extract(epoch FROM x.watched_until - clock_timestamp()))
                ORDER BY w.at)
            INTO seen, notifies FROM jsonb_array_elements(watched) WITH ORDINALITY w (v, at)
            LEFT JOIN :schema.queues x ON x.name = w.v ->> 1
                AND x.node = (SELECT id FROM :schema.nodes WHERE path = w.v ->> 0);
    END IF;
    SELECT min(CASE WHEN y.order_id <= x.last_owner THEN least(s.recovery_window,
                extract(epoch FROM s.seen - clock_timestamp()) + s.recovery_window)
            WHEN s.channel IN (caller, '') THEN  -- other engines look after their own
                extract(epoch FROM y.deadline - clock_timestamp()) END)
        INTO due FROM :schema.queues x JOIN :schema.requests y ON y.queue = x.id
        JOIN :schema.sessions s ON s.id = y.session WHERE x.id = ANY (queues);
    IF left(caller, 5) = 'poll_' AND places IS NOT NULL THEN
        SELECT jsonb_build_array(count(DISTINCT s.channel), count(DISTINCT y.queue)) INTO pollers
            FROM :schema.requests y JOIN :schema.sessions s ON s.id = y.session
            WHERE y.granted_at IS NULL AND left(s.channel, 5) = 'poll_';
    END IF;
    IF places IS NULL THEN  -- it waits for no lock, so it may come last
        DELETE FROM :schema.queues WHERE id IN (
            SELECT x.id FROM :schema.queues x WHERE x.max_count IS NULL AND x.owners + x.waiters = 0
                AND x.watched_until < clock_timestamp()
            ORDER BY x.id LIMIT 1000 FOR UPDATE SKIP LOCKED);
        DELETE FROM :schema.requests y WHERE NOT EXISTS (  -- their queue was deleted, not by these
            SELECT FROM :schema.queues x WHERE x.id = y.queue);
    END IF;
    RETURN jsonb_build_object('due', due, 'quarantine', frozen, 'events', events, 'seen', seen,
        'notifies', notifies, 'pollers', pollers,
        'why', (SELECT quarantine_reason FROM :schema.meta),
        'epoch', (SELECT epoch FROM :schema.meta))::text;
END $$;

-- Keep the queue of a name watched from now on; answers [id, counters].
CREATE OR REPLACE FUNCTION :schema.watch(
    of_session bigint, its_token text, its_name text, its_channel text
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    s :schema.sessions;
    q :schema.queues;
BEGIN
    PERFORM :schema.lock_tables();
    SELECT * INTO s FROM :schema.sessions WHERE id = of_session FOR KEY SHARE;
    IF :schema.fault(s, its_token) IS NOT NULL THEN
        RETURN :schema.fault(s, its_token);
    END IF;
    INSERT INTO :schema.queues (node, name) VALUES (s.node, its_name) ON CONFLICT DO NOTHING;
    UPDATE :schema.queues SET watched_until = clock_timestamp() + interval '90 seconds',
        watch_channel = its_channel WHERE node = s.node AND name = its_name RETURNING * INTO q;
    IF NOT FOUND THEN
        RAISE 'the semaphore has no row' USING ERRCODE = 'TN001';  -- sent again
    END IF;
    RETURN json_build_array(q.id, q.data_changes, q.owner_changes)::text;
END $$;

-- The state of requests of sessions, [session, token, [request id, ...]] each. Answers a list for each
-- session: ["gone"], ["taken"], or for each request the order id of an owner, [requests ahead, at most
-- 60] of a waiter, "reason" of one that was removed, null of one that is unknown.
CREATE OR REPLACE FUNCTION :schema.look(who jsonb) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET jit = off SET enable_seqscan = off AS $$
BEGIN
    RETURN (SELECT jsonb_agg(CASE
        WHEN :schema.fault(s, w.v ->> 1) IS NOT NULL THEN :schema.fault(s, w.v ->> 1)::jsonb
        ELSE coalesce((
            SELECT jsonb_agg(CASE
                WHEN x.id IS NULL THEN to_jsonb(v.reason)
                WHEN y.order_id <= x.last_owner THEN to_jsonb(y.order_id)
                ELSE jsonb_build_array((SELECT count(*) FROM (
                    SELECT FROM :schema.requests z WHERE z.queue = y.queue
                        AND z.order_id > x.last_owner AND z.order_id < y.order_id LIMIT 60) ahead))
                END ORDER BY n.at)
            FROM jsonb_array_elements_text(w.v -> 2) WITH ORDINALITY n (v, at)
            LEFT JOIN :schema.requests y ON y.session = s.id AND y.request_id = n.v::bigint
            LEFT JOIN :schema.queues x ON x.id = y.queue
            LEFT JOIN :schema.removals v ON v.session = s.id AND v.request_id = n.v::bigint), '[]')
        END ORDER BY w.at)::text
        FROM jsonb_array_elements(who) WITH ORDINALITY w (v, at)
        LEFT JOIN :schema.sessions s ON s.id = (w.v ->> 0)::bigint);
END $$;
