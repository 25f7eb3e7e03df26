-- Functions of the store. Each call is one transaction of one round trip.
--
-- Rules:
--   * A row is read for a decision, or written, only after this transaction has locked it, or the row
--     that stands for it: requests belong to their queue's row. Each statement sees what was
--     committed before it, so a row that is looked for again by its name may be another one.
--   * An operation of a session holds FOR KEY SHARE on its row, which a renewal does not wait for.
--     The end of a session and a new attachment hold FOR UPDATE.
--   * What another engine must know is sent with NOTIFY; what the caller must know is in the answer.
--   * Statements over lists look expensive to the planner, which knows no statistics of a list. They
--     are not compiled, and the frequent ones use indexes, behind a pooler too.
--   * Times are those of clock_timestamp(). A time that lies in the future, because the clock was
--     set back, counts as now.
--
-- There is no deadlock, because a transaction waits only for rows that come after all that it holds:
--
--   1. nodes, by id: attaching and takeovers share them, and the drop of a node holds it alone;
--   2. sessions, by id;
--   3. new queues, by node and name, as long as their inserts are not committed;
--   4. queues, by id;
--   5. `meta`: the next order id after a jump, the longest window, a quarantine.
--
--   * Nothing waits for a request: what a transaction guards is skipped, and tried again later.
--   * `tick` inserts queues first, and skips sessions that are locked. A sweep skips queues that are.
--   * A quarantine begins before all other locks, with those of all sessions before `meta`. What
--     finds one in between grants nothing: see `calm`.
--   * A guard holds the rows of requests, and waits for the end of a transaction that removes one. If
--     it guards several leases, it may wait while it holds others, for which nothing waits.

CREATE OR REPLACE FUNCTION SCHEMA.server_name() RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT (SELECT system_identifier FROM pg_catalog.pg_control_system())::text || '/'
        || left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 8)
$$;

-- One row if requests may be granted and this transaction commits as durably as it must. A look at it
-- takes no locks, so it may come after some.
CREATE OR REPLACE VIEW SCHEMA.calm AS
    SELECT true AS calm FROM SCHEMA.witness
    WHERE place = 'SCHEMA.meta'::regclass AND quarantined_until < clock_timestamp()
        AND current_setting('transaction_isolation') IN ('read committed', 'read uncommitted')
        AND (relaxed OR current_setting('synchronous_commit') <> 'off');

-- Seconds for which nothing is granted; 0 outside a quarantine. It begins one after a loss of data.
-- The transaction's commit waits for the disk unless a crash would begin one, whatever the account's
-- or the server's setting is.
CREATE OR REPLACE FUNCTION SCHEMA.quarantine() RETURNS double precision
LANGUAGE plpgsql AS $$
DECLARE
    m SCHEMA.meta;
    lost text;
    name text;
    ids bigint[];
BEGIN
    IF EXISTS (SELECT FROM SCHEMA.calm) THEN
        RETURN 0;
    ELSIF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE 'transactions are %', current_setting('transaction_isolation')
            USING ERRCODE = 'TN004', HINT = 'The functions need READ COMMITTED.';
    END IF;
    SELECT x.* INTO m FROM SCHEMA.meta x JOIN SCHEMA.witness w ON w.epoch = x.epoch
        WHERE x.place = 'SCHEMA.meta'::regclass;
    IF NOT m.relaxed AND current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    IF m.quarantined_until < clock_timestamp() THEN
        RETURN 0;
    ELSIF m.quarantined_until <= clock_timestamp() + make_interval(secs => m.longest_window) THEN
        RETURN extract(epoch FROM m.quarantined_until - clock_timestamp());
    END IF;
    ids := array(SELECT id FROM SCHEMA.sessions ORDER BY id FOR NO KEY UPDATE);
    UPDATE SCHEMA.meta  -- if the clock was set back
        SET quarantined_until = clock_timestamp() + make_interval(secs => longest_window)
        WHERE quarantined_until > clock_timestamp() + make_interval(secs => longest_window);
    SELECT * INTO m FROM SCHEMA.meta FOR UPDATE;
    IF m.place <> 'SCHEMA.meta'::regclass
            OR NOT EXISTS (SELECT FROM SCHEMA.witness w WHERE w.epoch = m.epoch) THEN
        name := SCHEMA.server_name();
        IF split_part(name, '/', 1) <> split_part(m.server, '/', 1)
                OR m.place <> 'SCHEMA.meta'::regclass
                OR name <> m.server AND NOT m.synchronous THEN
            lost := 'the database was restored, or another server was promoted';
        ELSIF m.relaxed THEN
            lost := 'the server crashed, and durability=process is in use';
        END IF;
        IF lost IS NOT NULL THEN
            m.quarantined_until := clock_timestamp() + make_interval(secs => m.longest_window);
            PERFORM setval('SCHEMA.order_ids', greatest(
                nextval('SCHEMA.order_ids'), (extract(epoch FROM clock_timestamp()) * 1e6)::bigint)
                + 1000000);
            m.epoch := md5(random()::text || clock_timestamp()::text);
            UPDATE SCHEMA.sessions SET seen = clock_timestamp() WHERE id = ANY (ids);
        END IF;
        UPDATE SCHEMA.meta SET epoch = m.epoch, server = name, place = 'SCHEMA.meta'::regclass,
            quarantine_reason = coalesce(lost, quarantine_reason),
            quarantined_until = m.quarantined_until;
    END IF;
    DELETE FROM SCHEMA.witness;
    INSERT INTO SCHEMA.witness SELECT epoch, place, relaxed, quarantined_until FROM SCHEMA.meta;
    RETURN greatest(0, extract(epoch FROM m.quarantined_until - clock_timestamp()));
END $$;

-- For an administrator who has restored the data of a stopped server, which nothing else shows.
CREATE OR REPLACE FUNCTION SCHEMA.data_was_restored() RETURNS void
LANGUAGE sql AS $$
    UPDATE SCHEMA.meta SET server = '';
    DELETE FROM SCHEMA.witness;
$$;

-- The next order id: above all before, above `above`, and near the clock's microseconds.
CREATE OR REPLACE FUNCTION SCHEMA.next_order_id(above bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    id bigint := nextval('SCHEMA.order_ids');
    wall bigint := extract(epoch FROM clock_timestamp()) * 1e6;
BEGIN
    IF id > above AND id > wall - 1000000 THEN
        RETURN id;
    END IF;
    IF id > above THEN
        PERFORM FROM SCHEMA.meta FOR UPDATE SKIP LOCKED;  -- who has it moves the sequence
        IF NOT FOUND THEN
            RETURN nextval('SCHEMA.order_ids');
        END IF;
    ELSE
        PERFORM FROM SCHEMA.meta FOR UPDATE;
    END IF;
    id := nextval('SCHEMA.order_ids');
    IF id > above AND id > wall - 1000000 THEN
        RETURN id;
    END IF;
    -- Others draw ids at the same time: it must not be set back below theirs.
    RETURN setval('SCHEMA.order_ids', greatest(id + 1000000, above + 1, wall));
END $$;

CREATE OR REPLACE FUNCTION SCHEMA.expired(s SCHEMA.sessions) RETURNS boolean
LANGUAGE sql AS $$
    SELECT clock_timestamp() - s.seen > make_interval(secs => s.recovery_window)
$$;

-- Report an event of a session: with NOTIFY, or as the result if its engine is the caller.
CREATE OR REPLACE FUNCTION SCHEMA.report(of_session bigint, event text, caller text) RETURNS text[]
LANGUAGE plpgsql AS $$
DECLARE
    its text;
BEGIN
    SELECT channel INTO its FROM SCHEMA.sessions WHERE id = of_session;
    IF its = caller THEN
        RETURN ARRAY[event];
    ELSIF left(its, 7) = 'tenure_' THEN
        PERFORM pg_notify(its, event);
    END IF;
    RETURN '{}';
END $$;

CREATE OR REPLACE FUNCTION SCHEMA.fits(q SCHEMA.queues, wanted numeric) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN q.whole THEN false
        WHEN wanted = coalesce(q.max_count, 18446744073709551615) THEN q.held = 0
        ELSE coalesce(q.max_count, 18446744073709551615) > 9007199254740991
            OR q.held + wanted <= q.max_count
    END
$$;

-- Write the counters of a queue, and notify its watchers: 'd' data, 'o' owners, 'b' both, '' none.
CREATE OR REPLACE FUNCTION SCHEMA.save(q SCHEMA.queues, changed text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE SCHEMA.queues SET held = q.held, whole = q.whole, owners = q.owners, waiters = q.waiters,
        last_owner = q.last_owner,
        data_changes = data_changes + (changed IN ('d', 'b'))::integer,
        owner_changes = owner_changes + (changed IN ('o', 'b'))::integer
    WHERE id = q.id;
    IF changed <> '' AND q.watch_channel <> '' AND q.watched_until > clock_timestamp() THEN
        PERFORM pg_notify(q.watch_channel, changed);
    END IF;
END $$;

-- Delete a request, under the lock of its queue; the events, or null if a transaction guards it.
-- `why` is empty if its session has called for that.
CREATE OR REPLACE FUNCTION SCHEMA.take_out(r SCHEMA.requests, why text, caller text) RETURNS text[]
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM SCHEMA.requests WHERE ctid = (
        SELECT ctid FROM SCHEMA.requests WHERE queue = r.queue AND order_id = r.order_id
        FOR UPDATE SKIP LOCKED);
    IF NOT FOUND THEN
        RETURN NULL;
    ELSIF why = '' THEN
        RETURN '{}';
    END IF;
    INSERT INTO SCHEMA.removals VALUES (r.session, r.request_id, r.order_id, why)
        ON CONFLICT DO NOTHING;
    RETURN SCHEMA.report(
        r.session, why || ' ' || r.session || ' ' || r.request_id || ' ' || r.order_id, caller);
END $$;

-- The counters of a queue without a request.
CREATE OR REPLACE FUNCTION SCHEMA.without(q SCHEMA.queues, r SCHEMA.requests) RETURNS SCHEMA.queues
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

-- Grant to the waiters that fit, in order, and save the queue.
CREATE OR REPLACE FUNCTION SCHEMA.settle(
    q SCHEMA.queues, changed text, frozen boolean, caller text
) RETURNS text[]
LANGUAGE plpgsql AS $$
DECLARE
    r SCHEMA.requests;
    events text[] := '{}';
    more text[];
BEGIN
    WHILE q.waiters > 0 AND NOT frozen LOOP
        SELECT * INTO r FROM SCHEMA.requests
            WHERE queue = q.id AND order_id > q.last_owner ORDER BY order_id LIMIT 1;
        IF NOT FOUND THEN
            q.waiters := 0;  -- rows were deleted by hand
            EXIT;
        END IF;
        IF r.deadline <= clock_timestamp() THEN
            more := SCHEMA.take_out(r, 't', caller);
            EXIT WHEN more IS NULL;
            events := events || more;
            q := SCHEMA.without(q, r);
            CONTINUE;
        END IF;
        EXIT WHEN NOT SCHEMA.fits(q, r.count);
        UPDATE SCHEMA.requests SET granted_at = clock_timestamp(), deadline = NULL
            WHERE queue = q.id AND order_id = r.order_id;
        q.held := q.held + r.count;
        q.whole := r.count = coalesce(q.max_count, 18446744073709551615);
        q.owners := q.owners + 1;
        q.waiters := q.waiters - 1;
        q.last_owner := r.order_id;
        changed := CASE changed WHEN '' THEN 'o' WHEN 'd' THEN 'b' ELSE changed END;
        events := events || SCHEMA.report(r.session,
            'g ' || r.session || ' ' || r.request_id || ' ' || r.order_id, caller);
    END LOOP;
    IF q.max_count IS NULL AND q.owners + q.waiters = 0 THEN  -- the semaphore disappears
        changed := 'b';
        UPDATE SCHEMA.queues SET data = '' WHERE id = q.id AND data <> '';
    END IF;
    PERFORM SCHEMA.save(q, changed);
    RETURN events;
END $$;

-- The operations of sessions, in order.
--   who: [session, token], ...
--   operations: [index in who, kind, request id, name, count, data, microseconds to wait, ephemeral], ...
--     kinds: "m" a mutex, with no more words; "e" enqueue; "E" enqueue, sent before; "w" withdraw.
--   fresh: [index in who, name], ...: ephemeral semaphores that may have no row yet
--   judged: the sessions that were reported as expired have been ended, as far as that is possible
-- Answers {"expired": [session, ...]} if nothing was done; or else a list: for each operation
-- the order id of an owner, [order id] of a waiter, 0 if refused or withdrawn, -1 if there was
-- nothing to withdraw, -2 if a transaction guards the request, ["what is wrong", ...]; then events
-- of the caller's sessions.
CREATE OR REPLACE FUNCTION SCHEMA.operate(
    caller text, highest bigint, relaxed boolean, who jsonb, operations jsonb, fresh jsonb,
    judged boolean
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET jit = off AS $$
DECLARE
    everything CONSTANT numeric := 18446744073709551615;
    total CONSTANT integer := jsonb_array_length(operations);
    left_of_quarantine double precision := SCHEMA.quarantine();
    frozen boolean := left_of_quarantine > 0;
    ids bigint[];
    nodes integer[];
    states text[];
    locked bigint[];  -- the locked rows; a row that appears later is not used
    q SCHEMA.queues;
    r SCHEMA.requests;
    each record;
    a jsonb;
    i integer;
    kind text;
    wanted numeric;
    top numeric;
    ephemeral boolean;
    there boolean;
    wait bigint;
    number bigint;
    answers text[] := array_fill(NULL::text, ARRAY[total]);
    events text[] := '{}';
    answer text;
    done boolean;
    dead bigint[];
BEGIN
    IF relaxed THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;

    -- Locks: sessions, new queues, queues.
    i := jsonb_array_length(who);
    ids := array_fill(0::bigint, ARRAY[i]);
    nodes := array_fill(0, ARRAY[i]);
    states := array_fill('gone'::text, ARRAY[i]);
    FOR each IN
        SELECT w.at, w.v ->> 1 AS token, s.id, s.node, s.token AS current, SCHEMA.expired(s) AS late
            FROM jsonb_array_elements(who) WITH ORDINALITY w (v, at)
            JOIN SCHEMA.sessions s ON s.id = (w.v ->> 0)::bigint
        ORDER BY s.id FOR KEY SHARE OF s
    LOOP
        ids[each.at] := each.id;
        nodes[each.at] := each.node;
        states[each.at] := CASE WHEN each.current <> each.token THEN 'taken'
            WHEN each.late THEN 'gone' ELSE '' END;
    END LOOP;
    IF fresh <> '[]' THEN
        INSERT INTO SCHEMA.queues (node, name)
            SELECT DISTINCT nodes[(f ->> 0)::integer], f ->> 1 FROM jsonb_array_elements(fresh) f
            WHERE states[(f ->> 0)::integer] = ''
            ORDER BY 1, 2 ON CONFLICT DO NOTHING;
    END IF;
    IF total = 1 THEN
        SELECT * INTO q FROM SCHEMA.queues
            WHERE node = nodes[(operations -> 0 ->> 0)::integer] AND name = operations -> 0 ->> 3
            FOR NO KEY UPDATE;
    ELSE
        WITH o AS MATERIALIZED (
            SELECT e.at, nodes[(e.v ->> 0)::integer] AS node, (e.v ->> 3) COLLATE "C" AS name
            FROM jsonb_array_elements(operations) WITH ORDINALITY e (v, at)
        ), found AS MATERIALIZED (
            SELECT x.id, x.node, x.name
            FROM (SELECT DISTINCT o.node, o.name FROM o) k
            JOIN SCHEMA.queues x ON x.node = k.node AND x.name = k.name
            ORDER BY x.id FOR NO KEY UPDATE OF x
        )
        SELECT array_agg(f.id ORDER BY o.at) INTO locked
            FROM o LEFT JOIN found f ON f.node = o.node AND f.name = o.name;
    END IF;

    -- A request that does not wait must not be refused because of an owner that has expired.
    IF NOT judged AND operations @? '$[*] ? (@[6] == "0")' THEN
        SELECT array_agg(DISTINCT s.id) INTO dead FROM jsonb_array_elements(operations) o
            JOIN SCHEMA.queues x ON x.node = nodes[(o ->> 0)::integer] AND x.name = o ->> 3
            JOIN SCHEMA.requests y ON y.queue = x.id
            JOIN SCHEMA.sessions s ON s.id = y.session
            WHERE o ->> 6 = '0' AND x.owners + x.waiters > 0 AND SCHEMA.expired(s);
        IF dead IS NOT NULL THEN
            RETURN '{"expired":[' || array_to_string(dead, ',') || ']}';
        END IF;
    END IF;

    -- All at once: mutexes that are free, and releases that no request waits for, each the only
    -- operation on its queue.
    IF total > 2 AND NOT frozen THEN
        PERFORM SCHEMA.next_order_id(highest);  -- the sequence is above it, and near the clock
        FOR each IN
            WITH o AS MATERIALIZED (
                SELECT e.at, ids[(e.v ->> 0)::integer] AS session, e.v ->> 1 AS kind,
                    (e.v ->> 2)::bigint AS number, x.id AS queue, x.owners, x.waiters, x.max_count,
                    count(*) OVER (PARTITION BY x.id) AS uses
                FROM jsonb_array_elements(operations) WITH ORDINALITY e (v, at)
                JOIN SCHEMA.queues x ON x.id = locked[e.at]
                WHERE states[(e.v ->> 0)::integer] = '' AND x.data = ''
                    AND x.watched_until < clock_timestamp()
            ), granted AS (
                INSERT INTO SCHEMA.requests
                SELECT o.queue, nextval('SCHEMA.order_ids'), o.session, o.number, everything, '',
                    clock_timestamp(), clock_timestamp(), NULL
                FROM o WHERE o.kind = 'm' AND o.uses = 1 AND o.owners + o.waiters = 0
                    AND o.max_count IS NULL
                RETURNING queue, order_id, count
            ), free AS (
                SELECT y.queue, y.order_id FROM o
                JOIN SCHEMA.requests y ON y.session = o.session AND y.request_id = o.number
                    AND y.queue = o.queue
                WHERE o.kind = 'w' AND o.uses = 1 AND o.waiters = 0
                FOR UPDATE OF y SKIP LOCKED
            ), released AS (
                DELETE FROM SCHEMA.requests y USING free
                WHERE y.queue = free.queue AND y.order_id = free.order_id
                RETURNING y.queue, 0::bigint AS order_id, -y.count AS count
            ), changed AS (
                SELECT * FROM granted UNION ALL SELECT * FROM released
            ), saved AS (
                UPDATE SCHEMA.queues x SET held = x.held + c.count, whole = c.order_id > 0,
                    owners = x.owners + CASE WHEN c.order_id > 0 THEN 1 ELSE -1 END,
                    last_owner = greatest(x.last_owner, c.order_id),
                    data_changes = data_changes + 1, owner_changes = owner_changes + 1
                FROM changed c WHERE x.id = c.queue
            )
            SELECT o.at, c.order_id FROM changed c JOIN o ON o.queue = c.queue
        LOOP
            answers[each.at] := each.order_id::text;
        END LOOP;
    END IF;

    FOR at IN 1 .. total LOOP
        CONTINUE WHEN answers[at] IS NOT NULL;
        a := operations -> at - 1;
        i := (a ->> 0)::integer;
        IF states[i] <> '' THEN
            answers[at] := '["' || states[i] || '"]';
            CONTINUE;
        END IF;
        kind := a ->> 1;
        number := (a ->> 2)::bigint;
        IF total > 1 THEN
            SELECT * INTO q FROM SCHEMA.queues WHERE id = locked[at];
        END IF;

        IF kind = 'w' THEN
            DELETE FROM SCHEMA.requests WHERE ctid = (
                SELECT ctid FROM SCHEMA.requests
                WHERE session = ids[i] AND request_id = number AND queue = q.id
                FOR UPDATE SKIP LOCKED) RETURNING * INTO r;
            IF FOUND THEN
                there := r.order_id <= q.last_owner;
                q := SCHEMA.without(q, r);
                events := events
                    || SCHEMA.settle(q, CASE WHEN there THEN 'o' ELSE '' END, frozen, caller);
                answers[at] := '0';
            ELSIF EXISTS (SELECT FROM SCHEMA.requests
                    WHERE session = ids[i] AND request_id = number) THEN
                answers[at] := CASE WHEN EXISTS (SELECT FROM SCHEMA.requests WHERE queue = q.id
                        AND session = ids[i] AND request_id = number) THEN '-2'
                    ELSE '["another name"]' END;
            ELSE
                DELETE FROM SCHEMA.removals WHERE session = ids[i] AND request_id = number;
                answers[at] := '-1';
            END IF;
            CONTINUE;
        END IF;

        IF kind = 'E' THEN
            SELECT * INTO r FROM SCHEMA.requests
                WHERE session = ids[i] AND request_id = number AND queue = q.id;
            IF FOUND THEN
                answers[at] := CASE WHEN r.order_id <= q.last_owner
                    THEN r.order_id::text ELSE '[' || r.order_id || ']' END;
                CONTINUE;
            END IF;
            SELECT '[' || order_id || ']' INTO answer FROM SCHEMA.removals
                WHERE session = ids[i] AND request_id = number;
            IF FOUND THEN
                answers[at] := answer;
                CONTINUE;
            END IF;
        END IF;

        wanted := coalesce((a ->> 4)::numeric, everything);
        ephemeral := kind = 'm' OR a ->> 7 = '1';
        there := q.max_count IS NOT NULL OR q.owners + q.waiters > 0;
        top := coalesce(q.max_count, everything);
        IF q.id IS NULL AND ephemeral THEN
            RAISE 'the semaphore has no row' USING ERRCODE = 'TN001';  -- sent again, as a fresh one
        ELSIF NOT coalesce(there, false) AND NOT ephemeral THEN
            answers[at] := '["missing"]';
            CONTINUE;
        ELSIF there AND ephemeral <> (q.max_count IS NULL) THEN
            answers[at] := '["kind",' || (NOT ephemeral)::integer || ']';
            CONTINUE;
        ELSIF wanted < 1 OR wanted > top OR wanted > 9007199254740991 AND wanted <> top THEN
            answers[at] := '["count",' || top || ']';
            CONTINUE;
        END IF;
        wait := nullif(a ->> 6, '')::bigint;
        done := NOT frozen AND q.waiters = 0 AND SCHEMA.fits(q, wanted);
        IF NOT done AND wait = 0 AND NOT frozen AND EXISTS (SELECT FROM SCHEMA.requests y
                WHERE y.queue = q.id AND y.order_id > q.last_owner
                    AND y.deadline <= clock_timestamp()) THEN
            events := events || SCHEMA.settle(q, '', frozen, caller);
            SELECT * INTO q FROM SCHEMA.queues WHERE id = q.id;
            done := q.waiters = 0 AND SCHEMA.fits(q, wanted);
        END IF;
        IF NOT done AND wait = 0 THEN
            answers[at] := CASE WHEN frozen
                THEN '["quarantined",' || left_of_quarantine || ']' ELSE '0' END;
            CONTINUE;
        END IF;
        r.order_id := SCHEMA.next_order_id(greatest(highest, q.last_owner));
        INSERT INTO SCHEMA.requests VALUES (
            q.id, r.order_id, ids[i], number, wanted, decode(coalesce(a ->> 5, ''), 'base64'),
            clock_timestamp(), CASE WHEN done THEN clock_timestamp() END,
            CASE WHEN NOT done THEN clock_timestamp() + make_interval(secs => wait / 1e6) END);
        IF done THEN
            q.held := q.held + wanted;
            q.whole := wanted = top;
            q.owners := q.owners + 1;
            q.last_owner := r.order_id;
            answers[at] := r.order_id::text;
        ELSE
            q.waiters := q.waiters + 1;
            answers[at] := '[' || r.order_id || ']';
        END IF;
        PERFORM SCHEMA.save(q, CASE WHEN NOT there THEN 'b' WHEN done THEN 'o' ELSE '' END);
    END LOOP;
    IF events <> '{}' THEN
        answers := answers || array(SELECT to_json(e)::text FROM unnest(events) e);
    END IF;
    RETURN '[' || array_to_string(answers, ',') || ']';
END $$;

-- One mutex that is free, as `operate` would acquire it, in a few short statements. Anything else is
-- left to `operate`.
CREATE OR REPLACE FUNCTION SCHEMA.acquire(
    caller text, highest bigint, relaxed boolean, of_session bigint, its_token text,
    number bigint, its_name text
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    its_node integer;
    its_queue bigint;
    answer bigint;
BEGIN
    IF relaxed THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    SELECT s.node INTO its_node FROM SCHEMA.sessions s, SCHEMA.calm
        WHERE s.id = of_session AND s.token = its_token AND NOT SCHEMA.expired(s)
        FOR KEY SHARE OF s;
    IF FOUND THEN
        answer := nextval('SCHEMA.order_ids');
    END IF;
    IF answer > greatest(highest, extract(epoch FROM clock_timestamp()) * 1e6 - 1000000) THEN
        UPDATE SCHEMA.queues x SET held = 18446744073709551615, whole = true, owners = 1,
            last_owner = answer, data_changes = x.data_changes + 1,
            owner_changes = x.owner_changes + 1
        WHERE x.node = its_node AND x.name = its_name AND x.owners = 0 AND x.waiters = 0
            AND x.max_count IS NULL AND x.data = '' AND x.watched_until < clock_timestamp()
            AND x.last_owner < answer  -- after it has waited for the row, too
        RETURNING x.id INTO its_queue;
        IF FOUND THEN
            INSERT INTO SCHEMA.requests VALUES (its_queue, answer, of_session, number,
                18446744073709551615, '', clock_timestamp(), clock_timestamp(), NULL);
            RETURN '[' || answer || ']';
        END IF;
    END IF;
    RETURN SCHEMA.operate(caller, highest, relaxed,
        jsonb_build_array(jsonb_build_array(of_session, its_token)),
        jsonb_build_array(jsonb_build_array(1, 'm', number, its_name)), '[]', false);
END $$;

-- One withdrawal that no request waits for, in the same way.
CREATE OR REPLACE FUNCTION SCHEMA.release(
    caller text, highest bigint, relaxed boolean, of_session bigint, its_token text,
    number bigint, its_name text
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    its_node integer;
    its_queue bigint;
    its_count numeric;
BEGIN
    IF relaxed THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    SELECT s.node INTO its_node FROM SCHEMA.sessions s, SCHEMA.calm
        WHERE s.id = of_session AND s.token = its_token AND NOT SCHEMA.expired(s)
        FOR KEY SHARE OF s;
    IF FOUND THEN
        SELECT x.id INTO its_queue FROM SCHEMA.queues x
            WHERE x.node = its_node AND x.name = its_name AND x.waiters = 0 AND x.data = ''
                AND x.watched_until < clock_timestamp()
            FOR NO KEY UPDATE;
    END IF;
    IF FOUND THEN
        DELETE FROM SCHEMA.requests WHERE ctid = (
            SELECT ctid FROM SCHEMA.requests
            WHERE session = of_session AND request_id = number AND queue = its_queue
            FOR UPDATE SKIP LOCKED) RETURNING count INTO its_count;
        IF FOUND THEN
            UPDATE SCHEMA.queues x SET held = x.held - its_count, whole = false,
                owners = x.owners - 1, data_changes = x.data_changes + 1,
                owner_changes = x.owner_changes + 1
            WHERE x.id = its_queue;
            RETURN '[0]';
        END IF;
    END IF;
    RETURN SCHEMA.operate(caller, highest, relaxed,
        jsonb_build_array(jsonb_build_array(of_session, its_token)),
        jsonb_build_array(jsonb_build_array(1, 'w', number, its_name)), '[]', false);
END $$;

-- Renew sessions, [session, token] each; answers the ids of those that live, or null if data were
-- lost since an epoch: then the sessions may have lost leases, and must be attached again.
CREATE OR REPLACE FUNCTION SCHEMA.renew(relaxed boolean, who jsonb, its_epoch text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    alive bigint[];
BEGIN
    PERFORM set_config('lock_timeout', '1500ms', true);  -- rather than a process that waits on
    IF relaxed THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    PERFORM SCHEMA.quarantine();
    IF NOT EXISTS (SELECT FROM SCHEMA.meta WHERE epoch = its_epoch) THEN
        RETURN NULL;
    END IF;
    PERFORM FROM SCHEMA.sessions s WHERE s.id IN (
            SELECT (w ->> 0)::bigint FROM jsonb_array_elements(who) w)
        ORDER BY s.id FOR NO KEY UPDATE;
    WITH renewed AS (
        UPDATE SCHEMA.sessions s SET seen = clock_timestamp() FROM jsonb_array_elements(who) w
            WHERE s.id = (w ->> 0)::bigint AND s.token = w ->> 1 AND NOT SCHEMA.expired(s)
            RETURNING s.id
    ) SELECT array_agg(id) INTO alive FROM renewed;
    RETURN coalesce(array_to_json(alive)::text, '[]');
END $$;

-- End sessions whose rows are locked.
CREATE OR REPLACE FUNCTION SCHEMA.end_sessions(dead bigint[], why text, caller text) RETURNS text[]
LANGUAGE plpgsql AS $$
DECLARE
    q SCHEMA.queues;
    r SCHEMA.requests;
    events text[] := '{}';
    owned boolean;
    frozen boolean := NOT EXISTS (SELECT FROM SCHEMA.calm);
    each bigint;
BEGIN
    PERFORM FROM SCHEMA.queues x
        WHERE x.id IN (SELECT y.queue FROM SCHEMA.requests y WHERE y.session = ANY (dead))
        ORDER BY x.id FOR NO KEY UPDATE;
    -- A transaction that guards a request keeps its session.
    dead := array(SELECT unnest(dead) EXCEPT SELECT y.session FROM SCHEMA.requests y
        WHERE y.session = ANY (dead) AND NOT EXISTS (
            SELECT FROM SCHEMA.requests z WHERE z.ctid = y.ctid FOR UPDATE SKIP LOCKED));
    FOR q IN SELECT * FROM SCHEMA.queues x
        WHERE x.id IN (SELECT y.queue FROM SCHEMA.requests y WHERE y.session = ANY (dead))
    LOOP
        owned := false;
        FOR r IN SELECT * FROM SCHEMA.requests y
            WHERE y.queue = q.id AND y.session = ANY (dead)
        LOOP
            owned := owned OR r.order_id <= q.last_owner;
            PERFORM SCHEMA.take_out(r, '', caller);
            q := SCHEMA.without(q, r);
        END LOOP;
        events := events || SCHEMA.settle(q, CASE WHEN owned THEN 'o' ELSE '' END, frozen, caller);
    END LOOP;
    FOREACH each IN ARRAY dead LOOP
        IF why <> '' THEN
            events := events || SCHEMA.report(each, 'E ' || each || ' ' || why, caller);
        END IF;
    END LOOP;
    DELETE FROM SCHEMA.removals WHERE session = ANY (dead);
    DELETE FROM SCHEMA.former WHERE session = ANY (dead);
    DELETE FROM SCHEMA.sessions WHERE id = ANY (dead);
    RETURN events;
END $$;

-- Lock the sessions among some that have expired, unless another transaction is at them.
CREATE OR REPLACE FUNCTION SCHEMA.lock_expired(candidates bigint[]) RETURNS bigint[]
LANGUAGE sql AS $$
    SELECT coalesce(array_agg(x.id), '{}') FROM (
        SELECT s.id FROM SCHEMA.sessions s WHERE s.id = ANY (candidates) AND SCHEMA.expired(s)
        ORDER BY s.id FOR UPDATE SKIP LOCKED) x
$$;

-- Expire sessions and requests in some queues, [node, name] each, or all with null. Renews what is
-- watched, [node, name, channel] each. Writes nothing if nothing has expired. Answers
-- {"due": seconds until an owner's session in these queues expires, unless it is renewed, or a waiter
-- of the caller does, "quarantine": seconds, "why": its reason, "epoch": the epoch, "seen": the
-- counters of each watched queue, "pollers": [programs that poll for waiters, queues for which they
-- poll] if the caller is one, "events": events}.
CREATE OR REPLACE FUNCTION SCHEMA.tick(caller text, places jsonb, watched jsonb) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET jit = off SET enable_seqscan = off AS $$
DECLARE
    frozen double precision := SCHEMA.quarantine();
    ids bigint[];
    q SCHEMA.queues;
    r SCHEMA.requests;
    events text[] := '{}';
    seen jsonb;
    due double precision;
    more text[];
    awaited bigint[];
    wanted bigint[];
    pollers jsonb;
BEGIN
    IF EXISTS (SELECT FROM jsonb_array_elements(watched) w JOIN SCHEMA.nodes n ON n.path = w ->> 0
            LEFT JOIN SCHEMA.queues x ON x.node = n.id AND x.name = w ->> 1 WHERE x.id IS NULL) THEN
        PERFORM FROM SCHEMA.nodes WHERE path IN (
            SELECT w ->> 0 FROM jsonb_array_elements(watched) w) ORDER BY id FOR KEY SHARE;
        INSERT INTO SCHEMA.queues (node, name)
            SELECT DISTINCT n.id, w ->> 1 FROM jsonb_array_elements(watched) w
                JOIN SCHEMA.nodes n ON n.path = w ->> 0
            ORDER BY 1, 2 ON CONFLICT DO NOTHING;
    END IF;
    UPDATE SCHEMA.sessions SET seen = clock_timestamp() WHERE id IN (
        SELECT id FROM SCHEMA.sessions s WHERE s.seen > clock_timestamp() + interval '1 second'
        ORDER BY id FOR UPDATE SKIP LOCKED);
    IF places IS NULL THEN
        ids := SCHEMA.lock_expired(array(SELECT id FROM SCHEMA.sessions s WHERE SCHEMA.expired(s)));
    ELSE
        ids := SCHEMA.lock_expired(array(
            SELECT y.session FROM jsonb_array_elements(places) p
                JOIN SCHEMA.nodes n ON n.path = p ->> 0
                JOIN SCHEMA.queues x ON x.node = n.id AND x.name = p ->> 1
                JOIN SCHEMA.requests y ON y.queue = x.id
                JOIN SCHEMA.sessions s ON s.id = y.session AND SCHEMA.expired(s)));
    END IF;
    awaited := array(
        SELECT x.id FROM jsonb_array_elements(places) p JOIN SCHEMA.nodes n ON n.path = p ->> 0
            JOIN SCHEMA.queues x ON x.node = n.id AND x.name = p ->> 1 AND x.waiters > 0);
    wanted := array(
        SELECT x.id FROM SCHEMA.queues x WHERE x.id = ANY (awaited) AND (
            frozen = 0 AND (SELECT SCHEMA.fits(x, y.count) FROM SCHEMA.requests y
                WHERE y.queue = x.id AND y.order_id > x.last_owner ORDER BY y.order_id LIMIT 1)
            OR EXISTS (SELECT FROM SCHEMA.requests y WHERE y.queue = x.id
                AND y.order_id > x.last_owner AND y.deadline <= clock_timestamp())));
    PERFORM FROM SCHEMA.queues x WHERE x.id = ANY (wanted)
        OR x.id IN (SELECT y.queue FROM SCHEMA.requests y WHERE y.session = ANY (ids))
        ORDER BY x.id FOR NO KEY UPDATE;
    IF ids <> '{}' THEN
        events := SCHEMA.end_sessions(ids, 'it expired', caller);
    END IF;
    FOR q IN SELECT * FROM SCHEMA.queues x WHERE x.id = ANY (wanted) AND x.waiters > 0 LOOP
        FOR r IN SELECT * FROM SCHEMA.requests y
            WHERE y.queue = q.id AND y.order_id > q.last_owner AND y.deadline <= clock_timestamp()
        LOOP
            more := SCHEMA.take_out(r, 't', caller);
            IF more IS NOT NULL THEN
                events := events || more;
                q := SCHEMA.without(q, r);
            END IF;
        END LOOP;
        events := events || SCHEMA.settle(q, '', frozen > 0, caller);
    END LOOP;
    IF watched IS NOT NULL THEN
        WITH due AS MATERIALIZED (
            SELECT x.id, w ->> 2 AS channel FROM jsonb_array_elements(watched) w
                JOIN SCHEMA.nodes n ON n.path = w ->> 0
                JOIN SCHEMA.queues x ON x.node = n.id AND x.name = w ->> 1
                WHERE x.watched_until < clock_timestamp() + interval '45 seconds'
            FOR NO KEY UPDATE OF x SKIP LOCKED
        ) UPDATE SCHEMA.queues x SET watched_until = clock_timestamp() + interval '90 seconds',
            watch_channel = due.channel FROM due WHERE x.id = due.id;
        SELECT jsonb_agg(jsonb_build_array(x.id, x.data_changes, x.owner_changes) ORDER BY w.at)
            INTO seen FROM jsonb_array_elements(watched) WITH ORDINALITY w (v, at)
            LEFT JOIN SCHEMA.nodes n ON n.path = w.v ->> 0
            LEFT JOIN SCHEMA.queues x ON x.node = n.id AND x.name = w.v ->> 1;
    END IF;
    SELECT min(least(s.recovery_window, extract(epoch FROM s.seen - clock_timestamp())
            + s.recovery_window))
        INTO due FROM jsonb_array_elements(places) p JOIN SCHEMA.nodes n ON n.path = p ->> 0
        JOIN SCHEMA.queues x ON x.node = n.id AND x.name = p ->> 1
        JOIN SCHEMA.requests y ON y.queue = x.id AND y.order_id <= x.last_owner
        JOIN SCHEMA.sessions s ON s.id = y.session;
    SELECT least(due, min(extract(epoch FROM y.deadline - clock_timestamp()))) INTO due
        FROM SCHEMA.queues x JOIN SCHEMA.requests y ON y.queue = x.id AND y.order_id > x.last_owner
        JOIN SCHEMA.sessions s ON s.id = y.session AND s.channel IN (caller, '')
        WHERE x.id = ANY (awaited);  -- other engines look after their own
    IF left(caller, 5) = 'poll_' AND places IS NOT NULL THEN
        SELECT jsonb_build_array(count(DISTINCT s.channel), count(DISTINCT y.queue)) INTO pollers
            FROM SCHEMA.requests y JOIN SCHEMA.sessions s ON s.id = y.session
            WHERE y.granted_at IS NULL AND left(s.channel, 5) = 'poll_';
    END IF;
    RETURN jsonb_build_object('due', due, 'quarantine', frozen, 'events', events, 'seen', seen,
        'pollers', pollers, 'why', (SELECT quarantine_reason FROM SCHEMA.meta),
        'epoch', (SELECT epoch FROM SCHEMA.meta))::text;
END $$;

-- Remove rows of ephemeral semaphores that are gone, and expire everything that is overdue.
CREATE OR REPLACE FUNCTION SCHEMA.sweep(caller text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    answer text := SCHEMA.tick(caller, NULL, NULL);  -- it waits for locks, so it comes first
BEGIN
    DELETE FROM SCHEMA.queues WHERE id IN (
        SELECT x.id FROM SCHEMA.queues x WHERE x.max_count IS NULL AND x.owners + x.waiters = 0
            AND x.watched_until < clock_timestamp() ORDER BY x.id LIMIT 1000 FOR UPDATE SKIP LOCKED);
    RETURN answer;
END $$;

-- Keep the queue of a name watched from now on; answers [id, counters].
CREATE OR REPLACE FUNCTION SCHEMA.watch(
    of_session bigint, its_token text, its_name text, its_channel text
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    s SCHEMA.sessions;
    q SCHEMA.queues;
BEGIN
    SELECT * INTO s FROM SCHEMA.sessions WHERE id = of_session FOR KEY SHARE;
    IF s.id IS NULL OR SCHEMA.expired(s) THEN
        RETURN '["gone"]';
    ELSIF s.token <> its_token THEN
        RETURN '["taken"]';
    END IF;
    INSERT INTO SCHEMA.queues AS x (node, name, watched_until, watch_channel)
        VALUES (s.node, its_name, clock_timestamp() + interval '90 seconds', its_channel)
        ON CONFLICT (node, name) DO UPDATE
            SET watched_until = EXCLUDED.watched_until, watch_channel = EXCLUDED.watch_channel
        RETURNING * INTO q;
    RETURN json_build_array(q.id, q.data_changes, q.owner_changes)::text;
END $$;

-- The state of requests of sessions, [session, token, [request id, ...]] each. Answers a list for each
-- session: ["gone"], ["taken"], or for each request the order id of an owner, [requests ahead, at most
-- 60] of a waiter, "reason" of one that was removed, null of one that is unknown.
CREATE OR REPLACE FUNCTION SCHEMA.look(who jsonb) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
    SET jit = off SET enable_seqscan = off AS $$
BEGIN
    RETURN (SELECT jsonb_agg(CASE
        WHEN s.id IS NULL OR SCHEMA.expired(s) THEN '["gone"]'::jsonb
        WHEN s.token <> w.v ->> 1 THEN '["taken"]'
        ELSE coalesce((
            SELECT jsonb_agg(CASE
                WHEN y.order_id IS NULL THEN to_jsonb(v.reason)
                WHEN y.order_id <= x.last_owner THEN to_jsonb(y.order_id)
                ELSE jsonb_build_array((SELECT count(*) FROM (
                    SELECT FROM SCHEMA.requests z WHERE z.queue = y.queue
                        AND z.order_id > x.last_owner AND z.order_id < y.order_id LIMIT 60) ahead))
                END ORDER BY n.at)
            FROM jsonb_array_elements_text(w.v -> 2) WITH ORDINALITY n (v, at)
            LEFT JOIN SCHEMA.requests y ON y.session = s.id AND y.request_id = n.v::bigint
            LEFT JOIN SCHEMA.queues x ON x.id = y.queue
            LEFT JOIN SCHEMA.removals v ON v.session = s.id AND v.request_id = n.v::bigint), '[]')
        END ORDER BY w.at)::text
        FROM jsonb_array_elements(who) WITH ORDINALITY w (v, at)
        LEFT JOIN SCHEMA.sessions s ON s.id = (w.v ->> 0)::bigint);
END $$;
