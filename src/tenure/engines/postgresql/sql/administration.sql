-- Functions of administration: nodes, lists, descriptions.

CREATE OR REPLACE FUNCTION :schema.hello(its_relaxed boolean, its_synchronous boolean) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    LOCK TABLE :schema.meta, :schema.witness, :schema.nodes, :schema.sessions IN ROW EXCLUSIVE MODE;
    PERFORM :schema.quarantine(connects => true);
    IF NOT EXISTS (SELECT FROM :schema.nodes WHERE path = ':node') THEN  -- it was deleted by hand
        INSERT INTO :schema.nodes (path, config) VALUES (':node', ':config') ON CONFLICT DO NOTHING;
    END IF;
    UPDATE :schema.meta SET relaxed = relaxed OR its_relaxed, synchronous = its_synchronous
        WHERE its_relaxed AND NOT relaxed OR synchronous <> its_synchronous;
    UPDATE :schema.witness SET relaxed = true WHERE its_relaxed AND NOT relaxed;
    RETURN :schema.examine();
END $$;

-- The state of the store. It writes nothing, and fails where `hello` would have to.
CREATE OR REPLACE FUNCTION :schema.examine() RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    left_of_quarantine double precision := :schema.quarantine();
BEGIN
    RETURN (SELECT json_build_array(
        version, epoch, left_of_quarantine, quarantine_reason, serves) FROM :schema.meta)::text;
END $$;

CREATE OR REPLACE FUNCTION :schema.store_time() RETURNS text
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT extract(epoch FROM clock_timestamp())::text
$$;

CREATE OR REPLACE FUNCTION :schema.create_node(its_path text, its_config text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM :schema.lock_tables();
    INSERT INTO :schema.nodes (path, config) VALUES (its_path, its_config) ON CONFLICT DO NOTHING;
    RETURN CASE WHEN FOUND THEN '["ok"]' ELSE '["exists"]' END;
END $$;

CREATE OR REPLACE FUNCTION :schema.alter_node(its_path text, old text, new text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM :schema.lock_tables();
    UPDATE :schema.nodes SET config = new WHERE path = its_path AND config = old;
    RETURN CASE WHEN FOUND THEN '["ok"]' ELSE '["changed"]' END;
END $$;

CREATE OR REPLACE FUNCTION :schema.drop_node(its_path text, force boolean, caller text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    its_node integer;
    ids bigint[];
    attached bigint;
    events text[];
    q :schema.queues;
BEGIN
    PERFORM :schema.lock_tables();
    LOCK TABLE :schema.rates IN ROW EXCLUSIVE MODE;
    SELECT id INTO its_node FROM :schema.nodes WHERE path = its_path FOR UPDATE;
    IF NOT FOUND THEN
        RETURN '["no node"]';
    END IF;
    SELECT count(*) INTO attached FROM :schema.sessions s
        WHERE s.node = its_node AND s.channel <> '' AND NOT :schema.expired(s);
    IF attached > 0 AND NOT force THEN  -- without locks, which would hold up their renewals
        RETURN json_build_array('busy', attached)::text;
    END IF;
    PERFORM FROM :schema.sessions WHERE node = its_node ORDER BY id FOR UPDATE;
    SELECT array_agg(s.id), count(*) FILTER (WHERE s.channel <> '' AND NOT :schema.expired(s))
        INTO ids, attached FROM :schema.sessions s WHERE s.node = its_node;
    IF attached > 0 AND NOT force THEN
        RETURN json_build_array('busy', attached)::text;
    END IF;
    PERFORM FROM :schema.queues WHERE node = its_node ORDER BY id FOR UPDATE;
    events := :schema.end_sessions(coalesce(ids, '{}'), 'its node was dropped', caller);
    IF EXISTS (SELECT FROM :schema.sessions WHERE node = its_node) THEN
        RAISE 'a transaction guards a request' USING ERRCODE = 'TN003';  -- is sent again, later
    END IF;
    FOR q IN DELETE FROM :schema.queues WHERE node = its_node RETURNING * LOOP
        IF q.watched_until > clock_timestamp() THEN
            PERFORM pg_notify(q.watch_channel, 'b');
        END IF;
    END LOOP;
    DELETE FROM :schema.rates WHERE node = its_node;
    DELETE FROM :schema.nodes WHERE id = its_node;
    RETURN json_build_array('ok', events)::text;
END $$;

CREATE OR REPLACE FUNCTION :schema.describe_node(its_path text) RETURNS text
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce((SELECT json_build_array('ok', n.config,
            (SELECT count(*) FROM :schema.sessions s WHERE s.node = n.id AND NOT :schema.expired(s)),
            (SELECT count(*) FROM :schema.queues q WHERE q.node = n.id
                AND (q.max_count IS NOT NULL OR q.owners + q.waiters > 0)))
        FROM :schema.nodes n WHERE n.path = its_path), '["no node"]')::text
$$;

CREATE OR REPLACE FUNCTION :schema.list_nodes() RETURNS text
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce(json_agg(path ORDER BY path), '[]')::text FROM :schema.nodes
$$;

-- The sessions of a node by id: those after an id, as many as there are with null.
CREATE OR REPLACE FUNCTION :schema.list_sessions(
    its_path text, after bigint DEFAULT 0, most integer DEFAULT NULL
) RETURNS text
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT coalesce((SELECT json_build_array('ok', (SELECT coalesce(json_agg(json_build_array(
            s.id, s.description, s.recovery_window,
            s.channel <> '' AND clock_timestamp() - s.seen
                < make_interval(secs => s.recovery_window / 2),
            greatest(0, extract(epoch FROM clock_timestamp() - s.seen))) ORDER BY s.id), '[]')
        FROM (SELECT * FROM :schema.sessions s
            WHERE s.node = n.id AND s.id > after AND NOT :schema.expired(s)
            ORDER BY s.id LIMIT most) s))
        FROM :schema.nodes n WHERE n.path = its_path), '["no node"]')::text
$$;

-- The queues to describe: of one name, or those after a name, with as many semaphores and requests
-- as a page has, at least one, or with null all of them.
CREATE OR REPLACE FUNCTION :schema.page(
    its_node integer, its_name text, after text, most integer, included text
) RETURNS bigint[]
LANGUAGE sql AS $$
    SELECT coalesce(array_agg(y.id), '{}') FROM (
        SELECT x.id, coalesce(sum(1 + CASE included WHEN 'all' THEN x.owners + x.waiters
                WHEN 'owners' THEN x.owners ELSE 0 END)
            OVER (ORDER BY x.name ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS before
        FROM (SELECT * FROM :schema.queues x
            WHERE x.node = its_node AND (x.name = its_name OR its_name IS NULL AND x.name > after)
                AND (x.max_count IS NOT NULL OR x.owners + x.waiters > 0)
            ORDER BY x.name LIMIT most) x
    ) y WHERE most IS NULL OR y.before < most
$$;

-- Describe a semaphore of a node, or a page of them: [name, data, limit or null, held, waiters,
-- requests] each. Requests are included up to a mark: "all", "owners" or "none".
CREATE OR REPLACE FUNCTION :schema.describe(
    its_path text, its_name text, included text, after text DEFAULT '', most integer DEFAULT NULL
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    its_node integer;
    ids bigint[];
BEGIN
    PERFORM :schema.lock_tables();
    SELECT id INTO its_node FROM :schema.nodes WHERE path = its_path;
    IF NOT FOUND THEN
        RETURN '["no node"]';
    END IF;
    ids := :schema.page(its_node, its_name, after, most, included);
    IF EXISTS (SELECT FROM :schema.requests r JOIN :schema.sessions s ON s.id = r.session
            WHERE r.queue = ANY (ids)
                AND (:schema.expired(s) OR r.deadline <= clock_timestamp()))
            OR EXISTS (SELECT FROM :schema.queues x WHERE x.id = ANY (ids) AND :schema.damaged(x)) THEN
        PERFORM :schema.tick('', (SELECT jsonb_agg(jsonb_build_array(its_path, x.name))
            FROM :schema.queues x WHERE x.id = ANY (ids)), NULL);
        ids := :schema.page(its_node, its_name, after, most, included);
    END IF;
    RETURN (SELECT json_build_array('ok', coalesce(json_agg(json_build_array(
            q.name, encode(q.data, 'base64'), q.max_count, q.held, q.waiters,
            CASE WHEN included <> 'none' THEN (SELECT json_agg(json_build_array(
                    r.order_id <= q.last_owner, r.session, r.order_id, r.count,
                    encode(r.data, 'base64'),
                    greatest(0, extract(epoch FROM
                        clock_timestamp() - coalesce(r.granted_at, r.joined_at))),
                    CASE WHEN r.deadline IS NOT NULL THEN
                        greatest(0, extract(epoch FROM r.deadline - clock_timestamp())) END,
                    greatest(0, s.recovery_window
                        - greatest(0, extract(epoch FROM clock_timestamp() - s.seen))),
                    s.description) ORDER BY r.order_id)
                FROM :schema.requests r JOIN :schema.sessions s ON s.id = r.session
                WHERE r.queue = q.id AND (included = 'all' OR r.order_id <= q.last_owner)) END)
            ORDER BY q.name), '[]'))
        FROM :schema.queues q WHERE q.id = ANY (ids))::text;
END $$;

CREATE OR REPLACE FUNCTION :schema.end_session(its_path text, number bigint, caller text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    its_node integer;
    events text[];
BEGIN
    PERFORM :schema.lock_tables();
    SELECT id INTO its_node FROM :schema.nodes WHERE path = its_path;
    IF NOT FOUND THEN
        RETURN '["no node"]';
    END IF;
    PERFORM FROM :schema.sessions WHERE id = number AND node = its_node FOR UPDATE;
    IF NOT FOUND THEN
        RETURN '["ok",false,[]]';
    END IF;
    events := :schema.end_sessions(ARRAY[number], 'an administrator ended it', caller);
    IF EXISTS (SELECT FROM :schema.sessions WHERE id = number) THEN
        RAISE 'a transaction guards a request' USING ERRCODE = 'TN003';  -- is sent again, later
    END IF;
    RETURN json_build_array('ok', true, events)::text;
END $$;

CREATE OR REPLACE FUNCTION :schema.evict(
    its_path text, its_name text, number bigint, caller text
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    its_node integer;
    q :schema.queues;
    r :schema.requests;
    events text[];
    owned boolean;
BEGIN
    PERFORM :schema.lock_tables();
    SELECT id INTO its_node FROM :schema.nodes WHERE path = its_path;
    IF NOT FOUND THEN
        RETURN '["no node"]';
    END IF;
    SELECT * INTO q FROM :schema.queues WHERE node = its_node AND name = its_name FOR NO KEY UPDATE;
    IF q.id IS NULL OR q.max_count IS NULL AND q.owners + q.waiters = 0 THEN
        RETURN '["missing"]';
    END IF;
    SELECT * INTO r FROM :schema.requests WHERE queue = q.id AND order_id = number;
    IF NOT FOUND THEN
        RETURN '["ok",false,[]]';
    END IF;
    owned := r.order_id <= q.last_owner;
    events := :schema.take_out(r, 'e', caller);
    IF events IS NULL THEN
        RAISE 'a transaction guards the request' USING ERRCODE = 'TN003';  -- is sent again, later
    END IF;
    events := events || :schema.settle(:schema.without(q, r),
        CASE WHEN owned THEN 'o' ELSE '' END, NOT EXISTS (SELECT FROM :schema.calm), caller);
    RETURN json_build_array('ok', true, events)::text;
END $$;

-- The fence in a transaction of the user's: it fails unless the lease is held, and keeps it until
-- the transaction ends.
CREATE OR REPLACE FUNCTION :schema.guard(node text, name text, token bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    s :schema.sessions;
    follows boolean;
BEGIN
    FOR attempt IN 1 .. 260 LOOP
        SELECT z.* INTO s FROM :schema.requests y
            JOIN :schema.queues x ON x.id = y.queue AND x.name = guard.name AND y.order_id <= x.last_owner
            JOIN :schema.nodes n ON n.id = x.node AND n.path = guard.node
            JOIN :schema.sessions z ON z.id = y.session
            WHERE y.order_id = guard.token FOR KEY SHARE OF y;
        -- The program may have granted the lease when it sent the release of one of its own that is
        -- directly ahead. Then this waits until that has arrived.
        follows := s.id IS NULL AND EXISTS (
            SELECT FROM :schema.requests y
            JOIN :schema.queues x ON x.id = y.queue AND x.name = guard.name AND x.whole
                AND x.max_count IS NULL
            JOIN :schema.nodes n ON n.id = x.node AND n.path = guard.node
            WHERE y.order_id = guard.token AND NOT EXISTS (
                SELECT FROM :schema.requests z WHERE z.queue = y.queue
                    AND z.order_id < y.order_id AND z.session <> y.session));
        EXIT WHEN NOT follows OR attempt = 260
            OR current_setting('transaction_isolation') IN ('repeatable read', 'serializable');
        PERFORM pg_sleep(least(0.001 * attempt, 0.02));
    END LOOP;
    IF follows THEN
        RAISE 'could not serialize access, because the lease of % on % was granted just now',
            name, node USING ERRCODE = '40001', HINT = 'Roll back, and retry the transaction.';
    END IF;
    -- VACUUM FULL and CLUSTER forget of a deleted row that it was deleted, and not just changed. So a
    -- transaction with an older snapshot could lock it.
    IF pg_relation_filenode(':schema.requests'::regclass) <> (
            SELECT relfilenode FROM pg_class WHERE oid = ':schema.requests'::regclass) THEN
        RAISE 'could not serialize access, because the table of requests was rewritten'
            USING ERRCODE = '40001', HINT = 'Roll back, and retry the transaction.';
    END IF;
    IF :schema.expired(s) THEN  -- if it was renewed since the snapshot, this is a failure to serialize
        PERFORM FROM :schema.sessions WHERE id = s.id FOR SHARE SKIP LOCKED;
    END IF;
    IF s.id IS NULL OR :schema.expired(s) THEN
        RAISE 'the lease of % on % with token % is not held any more', name, node, token
            USING ERRCODE = 'TN002', HINT = 'Roll back: another program may own it now.';
    END IF;
END $$;
