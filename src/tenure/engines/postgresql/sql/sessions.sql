-- Functions of sessions: attaching, taking over, leaving, and changes of semaphores.

CREATE OR REPLACE FUNCTION :schema.attach(
    its_path text, its_token text, its_channel text, its_window double precision,
    its_description text, its_liveness text, its_key text, most integer
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    its_node integer;
BEGIN
    LOCK TABLE :schema.meta, :schema.sessions IN ROW EXCLUSIVE MODE;
    PERFORM :schema.quarantine();
    SELECT id INTO its_node FROM :schema.nodes WHERE path = its_path FOR KEY SHARE;
    IF NOT FOUND THEN
        RETURN '["no node"]';
    END IF;
    IF NOT EXISTS (SELECT FROM :schema.sessions WHERE token = its_token) THEN  -- or else sent before
        IF (SELECT reltuples FROM pg_class WHERE oid = ':schema.sessions'::regclass) > most / 2
                AND (SELECT count(*) FROM :schema.sessions WHERE node = its_node) >= most THEN
            RETURN '["full"]';
        END IF;
        INSERT INTO :schema.sessions
                (id, node, token, channel, seen, recovery_window, liveness, key, description)
            VALUES (nextval(':schema.session_ids'), its_node, its_token, its_channel,
                clock_timestamp(), its_window, its_liveness, decode(its_key, 'hex'),
                its_description)
            ON CONFLICT DO NOTHING;  -- if it was sent before, and was committed only now
        UPDATE :schema.meta SET longest_window = its_window WHERE longest_window < its_window;
    END IF;
    RETURN json_build_array('ok', (SELECT id FROM :schema.sessions WHERE token = its_token))::text;
END $$;

-- Attach sessions of the caller again, after a lost connection, [session, [old tokens], new token,
-- whether it is renewed, too] each; a program of a former version omits the last and counts on being
-- renewed. Commands with an old token are refused then. This does not wait for long for one that is
-- under way: sessions whose rows it has locked are not renewed meanwhile. Answers
-- [epoch, [answer, ...]]: "taken", "gone", "ok", or, if data were lost since an epoch, the requests:
-- [request id, name, owns] each.
CREATE OR REPLACE FUNCTION :schema.reattach(its_channel text, who jsonb, its_epoch text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    each record;
    answers jsonb[] := array_fill('"gone"'::jsonb, ARRAY[jsonb_array_length(who)]);
    now_epoch text;
BEGIN
    LOCK TABLE :schema.sessions IN ROW EXCLUSIVE MODE;
    PERFORM :schema.quarantine();
    SELECT epoch INTO now_epoch FROM :schema.meta;
    IF now_epoch <> its_epoch THEN
        LOCK TABLE :schema.queues, :schema.requests IN ROW EXCLUSIVE MODE;
    END IF;
    PERFORM set_config('lock_timeout', '200ms', true);
    FOR each IN
        SELECT w.at, w.v, s FROM jsonb_array_elements(who) WITH ORDINALITY w (v, at)
            JOIN :schema.sessions s ON s.id = (w.v ->> 0)::bigint
        ORDER BY s.id FOR UPDATE OF s
    LOOP
        IF :schema.expired(each.s) THEN
            CONTINUE;
        ELSIF NOT (each.v -> 1) ? (each.s).token THEN
            answers[each.at] := '"taken"';
            CONTINUE;
        END IF;
        UPDATE :schema.sessions SET token = each.v ->> 2, channel = its_channel,
            seen = CASE WHEN coalesce((each.v -> 3)::boolean, true)
                THEN clock_timestamp() ELSE seen END
            WHERE id = (each.s).id;
        answers[each.at] := CASE WHEN now_epoch = its_epoch THEN '"ok"' ELSE (
            SELECT coalesce(jsonb_agg(jsonb_build_array(
                y.request_id, x.name, y.order_id <= x.last_owner)), '[]')
            FROM :schema.requests y JOIN :schema.queues x ON x.id = y.queue
            WHERE y.session = (each.s).id) END;
    END LOOP;
    RETURN jsonb_build_array(now_epoch, to_jsonb(answers))::text;
END $$;

-- Take a session over: its former attachment is refused from now on, and notified.
CREATE OR REPLACE FUNCTION :schema.take_over(
    its_path text, number bigint, secret text, its_channel text, its_key text,
    its_window double precision
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    its_node integer;
    s :schema.sessions;
    new_token text;
    events text[] := '{}';
BEGIN
    LOCK TABLE :schema.meta, :schema.sessions, :schema.former IN ROW EXCLUSIVE MODE;
    PERFORM :schema.quarantine();
    SELECT id INTO its_node FROM :schema.nodes WHERE path = its_path;
    IF NOT FOUND THEN
        RETURN '["no node"]';
    END IF;
    SELECT * INTO s FROM :schema.sessions WHERE id = number;
    IF s.key = decode(its_key, 'hex') THEN  -- a guess locks nothing, and so writes nothing
        SELECT * INTO s FROM :schema.sessions WHERE id = number FOR UPDATE;
    END IF;
    IF s.id IS NULL OR s.node <> its_node OR :schema.expired(s) THEN
        RETURN '["gone"]';
    ELSIF s.key <> decode(its_key, 'hex') OR s.liveness <> 'window' THEN
        RETURN json_build_array('refused', s.liveness, encode(s.key, 'hex'))::text;
    END IF;
    new_token := s.token;
    IF split_part(s.token, '.', 2) <> secret THEN  -- or else sent before
        new_token := split_part(s.token, '.', 1)::bigint + 1 || '.' || secret;
        IF s.channel <> '' THEN
            INSERT INTO :schema.former VALUES (number, s.token,
                least(s.seen, clock_timestamp()) + make_interval(secs => s.recovery_window))
                ON CONFLICT DO NOTHING;
        END IF;
        events := :schema.report(number, 'T ' || number || ' ' || s.token, its_channel);
    END IF;
    UPDATE :schema.sessions SET token = new_token, channel = its_channel, seen = clock_timestamp(),
        recovery_window = coalesce(its_window, recovery_window) WHERE id = number;
    UPDATE :schema.meta SET longest_window = its_window WHERE longest_window < its_window;
    RETURN json_build_array('ok', new_token, coalesce(its_window, s.recovery_window),
        s.description, events)::text;
END $$;

-- Renew a session during its takeover; answers the seconds for which a former attachment may hold
-- a lease.
CREATE OR REPLACE FUNCTION :schema.remaining(number bigint, its_token text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    s :schema.sessions;
    latest timestamptz;
BEGIN
    LOCK TABLE :schema.meta, :schema.nodes, :schema.sessions, :schema.former IN ROW EXCLUSIVE MODE;
    PERFORM :schema.quarantine();
    SELECT * INTO s FROM :schema.sessions WHERE id = number FOR NO KEY UPDATE;
    IF :schema.fault(s, its_token) IS NOT NULL THEN
        RETURN :schema.fault(s, its_token);
    END IF;
    UPDATE :schema.sessions SET seen = clock_timestamp() WHERE id = number;
    SELECT clock_timestamp() + make_interval(secs => longest_window) INTO latest FROM :schema.meta;
    UPDATE :schema.former SET until = latest WHERE session = number AND until > latest;
    RETURN json_build_array('ok', (SELECT coalesce(max(
        greatest(0, extract(epoch FROM until - clock_timestamp()))), 0)
        FROM :schema.former WHERE session = number))::text;
END $$;

-- Lock the row of a session, which the transaction has FOR KEY SHARE, to write it. It comes after the
-- locks of queues, and so must not wait: it is sent again where another transaction has the row.
CREATE OR REPLACE FUNCTION :schema.lock_own(number bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM :schema.sessions WHERE id = number FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RAISE 'the session is being renewed' USING ERRCODE = 'TN001';
    END IF;
END $$;

-- Complete a takeover; answers the requests of the session.
CREATE OR REPLACE FUNCTION :schema.begin_session(
    number bigint, its_token text, its_description text
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    s :schema.sessions;
BEGIN
    PERFORM :schema.lock_tables();
    SELECT * INTO s FROM :schema.sessions WHERE id = number FOR KEY SHARE;
    IF :schema.fault(s, its_token) IS NOT NULL THEN
        RETURN :schema.fault(s, its_token);
    END IF;
    -- A grant that is under way goes to the former attachment's channel, so it is waited for.
    PERFORM FROM :schema.queues x
        WHERE x.id IN (SELECT y.queue FROM :schema.requests y WHERE y.session = number)
        ORDER BY x.id FOR NO KEY UPDATE;
    PERFORM :schema.lock_own(number);
    UPDATE :schema.sessions SET seen = clock_timestamp(), description = its_description,
        change_number = 0, change_answer = '' WHERE id = number;
    DELETE FROM :schema.former WHERE session = number;
    DELETE FROM :schema.removals WHERE session = number;
    RETURN json_build_array('ok', (SELECT coalesce(json_agg(json_build_array(
            y.request_id, x.name, y.order_id, y.count, encode(y.data, 'base64'),
            x.max_count IS NULL, y.order_id <= x.last_owner) ORDER BY y.order_id), '[]')
        FROM :schema.requests y JOIN :schema.queues x ON x.id = y.queue
        WHERE y.session = number))::text;
END $$;

-- Note that former attachments of a session hold nothing any more.
CREATE OR REPLACE FUNCTION :schema.acknowledge(number bigint, tokens jsonb, caller text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM :schema.lock_tables();
    DELETE FROM :schema.former WHERE session = number AND tokens ? token;
    IF FOUND THEN
        RETURN to_json(:schema.report(number, 'A ' || number, caller))::text;
    END IF;
    RETURN '[]';
END $$;

-- Close or detach a session that has one of some tokens; answers ["ok", event, ...],
-- ["guarded", event, ...] if a transaction guards one of its requests, "taken" or "gone".
CREATE OR REPLACE FUNCTION :schema.leave(
    number bigint, tokens jsonb, detach boolean, caller text, relaxed boolean
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    s :schema.sessions;
    events text[];
BEGIN
    PERFORM :schema.lock_tables(relaxed);
    SELECT * INTO s FROM :schema.sessions WHERE id = number FOR UPDATE;
    IF s.id IS NULL THEN
        RETURN '["gone"]';
    ELSIF NOT tokens ? s.token THEN
        RETURN :schema.acknowledge(number, tokens, caller);
    ELSIF detach THEN
        UPDATE :schema.sessions SET channel = '', seen = clock_timestamp() WHERE id = number;
        RETURN '["ok"]';
    END IF;
    events := :schema.end_sessions(ARRAY[number], '', caller);
    IF EXISTS (SELECT FROM :schema.sessions WHERE id = number) THEN
        RETURN array_to_json(ARRAY['guarded'] || events)::text;
    END IF;
    RETURN array_to_json(ARRAY['ok'] || events)::text;
END $$;

-- Create, update or delete a semaphore, or alter a request, once for each number.
--   create: name, limit, data, exist_ok, the most semaphores of a node
--   update: name, data
--   delete: name, force
--   alter: name, request id, count or null, data or null, microseconds to wait, or "" for ever, or
--     "-" as before
-- Answers ["ok", [event, ...]] or ["what is wrong", ...].
CREATE OR REPLACE FUNCTION :schema.change(
    of_session bigint, its_token text, number bigint, kind text, args jsonb, caller text,
    relaxed boolean
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    s :schema.sessions;
    q :schema.queues;
    answer text;
BEGIN
    PERFORM :schema.lock_tables(relaxed);
    SELECT * INTO s FROM :schema.sessions WHERE id = of_session FOR KEY SHARE;
    IF :schema.fault(s, its_token) IS NOT NULL THEN
        RETURN :schema.fault(s, its_token);
    ELSIF s.change_number = number THEN
        RETURN s.change_answer;
    END IF;
    IF kind = 'create' THEN
        INSERT INTO :schema.queues (node, name) VALUES (s.node, args ->> 0) ON CONFLICT DO NOTHING;
    END IF;
    SELECT * INTO q FROM :schema.queues WHERE node = s.node AND name = args ->> 0
        FOR NO KEY UPDATE;
    answer := CASE kind
        WHEN 'create' THEN :schema.create_semaphore(q, args)
        WHEN 'update' THEN :schema.update_semaphore(q, args)
        WHEN 'resize' THEN :schema.resize_semaphore(q, args, caller)
        WHEN 'delete' THEN :schema.delete_semaphore(q, args, caller)
        ELSE :schema.alter_request(of_session, q, args, caller) END;
    PERFORM :schema.lock_own(of_session);
    UPDATE :schema.sessions SET change_number = number, change_answer = answer
        WHERE id = of_session;
    RETURN answer;
END $$;

CREATE OR REPLACE FUNCTION :schema.create_semaphore(q :schema.queues, args jsonb) RETURNS text
LANGUAGE plpgsql AS $$
BEGIN
    IF q.id IS NULL THEN
        RAISE 'removed since it was created' USING ERRCODE = 'TN001';
    ELSIF q.max_count IS NULL AND q.owners + q.waiters > 0 THEN
        RETURN '["kind",0]';
    ELSIF q.max_count IS NOT NULL THEN
        IF (args ->> 3)::boolean AND q.max_count = (args ->> 1)::numeric THEN
            RETURN '["ok",[]]';
        END IF;
        RETURN json_build_array('exists', q.max_count)::text;
    ELSIF (SELECT reltuples FROM pg_class WHERE oid = ':schema.queues'::regclass)
            > (args ->> 4)::integer / 2 AND (args ->> 4)::integer <= (
                SELECT count(*) FROM :schema.queues
                WHERE node = q.node AND max_count IS NOT NULL) THEN
        RETURN '["full"]';
    END IF;
    q.max_count := (args ->> 1)::numeric;
    UPDATE :schema.queues SET max_count = q.max_count, data = decode(args ->> 2, 'base64')
        WHERE id = q.id;
    PERFORM :schema.settle(q, 'b', true, '');
    RETURN '["ok",[]]';
END $$;

CREATE OR REPLACE FUNCTION :schema.update_semaphore(q :schema.queues, args jsonb) RETURNS text
LANGUAGE plpgsql AS $$
BEGIN
    IF q.id IS NULL OR q.max_count IS NULL AND q.owners + q.waiters = 0 THEN
        RETURN '["missing"]';
    ELSIF q.data <> decode(args ->> 1, 'base64') THEN
        UPDATE :schema.queues SET data = decode(args ->> 1, 'base64') WHERE id = q.id;
        PERFORM :schema.settle(q, 'd', true, '');
    END IF;
    RETURN '["ok",[]]';
END $$;

-- Waiters for more than the new limit leave the queue, where they would block those behind them.
CREATE OR REPLACE FUNCTION :schema.resize_semaphore(
    q :schema.queues, args jsonb, caller text
) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    r :schema.requests;
    top numeric := (args ->> 1)::numeric;
    frozen boolean := NOT EXISTS (SELECT FROM :schema.calm);
    events text[] := '{}';
    more text[];
BEGIN
    IF q.id IS NULL OR q.max_count IS NULL AND q.owners + q.waiters = 0 THEN
        RETURN '["missing"]';
    ELSIF q.max_count IS NULL THEN
        RETURN '["kind",0]';
    ELSIF q.max_count > 9007199254740991 THEN
        RETURN json_build_array('unbounded', q.max_count)::text;
    ELSIF q.max_count = top THEN
        RETURN '["ok",[]]';
    END IF;
    FOR r IN SELECT * FROM :schema.requests
        WHERE queue = q.id AND order_id > q.last_owner AND count > top ORDER BY order_id
    LOOP
        more := :schema.take_out(r, 'r' || top, caller);
        IF more IS NULL THEN
            RAISE 'a transaction guards a request' USING ERRCODE = 'TN003';  -- is sent again, later
        END IF;
        events := events || more;
        q := :schema.without(q, r);
    END LOOP;
    UPDATE :schema.queues SET max_count = top WHERE id = q.id;
    q.max_count := top;
    q.whole := q.owners = 1 AND q.held = top;
    events := events || :schema.settle(q, 'd', frozen, caller);
    RETURN json_build_array('ok', events)::text;
END $$;

CREATE OR REPLACE FUNCTION :schema.delete_semaphore(
    q :schema.queues, args jsonb, caller text
) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    r :schema.requests;
    events text[] := '{}';
    more text[];
BEGIN
    IF q.id IS NULL OR q.max_count IS NULL AND q.owners + q.waiters = 0 THEN
        RETURN '["missing"]';
    ELSIF q.owners + q.waiters > 0 AND NOT (args ->> 1)::boolean THEN
        RETURN '["busy"]';
    END IF;
    FOR r IN SELECT * FROM :schema.requests WHERE queue = q.id ORDER BY order_id LOOP
        more := :schema.take_out(r, 'x', caller);
        IF more IS NULL THEN
            RAISE 'a transaction guards a request' USING ERRCODE = 'TN003';  -- is sent again, later
        END IF;
        events := events || more;
        q := :schema.without(q, r);
    END LOOP;
    UPDATE :schema.queues SET max_count = NULL WHERE id = q.id;
    q.max_count := NULL;
    PERFORM :schema.settle(q, 'b', true, '');
    RETURN json_build_array('ok', events)::text;
END $$;

CREATE OR REPLACE FUNCTION :schema.alter_request(
    of_session bigint, q :schema.queues, args jsonb, caller text
) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    r :schema.requests;
    top numeric := coalesce(q.max_count, 18446744073709551615);
    new_count numeric := (args ->> 2)::numeric;
    new_data bytea := decode(args ->> 3, 'base64');
    wait text := args ->> 4;
    owns boolean;
    changed text := '';
    frozen boolean := NOT EXISTS (SELECT FROM :schema.calm);
    events text[];
    more text[];
BEGIN
    SELECT * INTO r FROM :schema.requests
        WHERE queue = q.id AND session = of_session AND request_id = (args ->> 1)::bigint;
    IF NOT FOUND THEN
        RETURN '["released"]';
    END IF;
    owns := r.order_id <= q.last_owner;
    IF new_count < 1 OR new_count > r.count
            OR new_count > 9007199254740991 AND new_count <> top THEN
        RETURN json_build_array('shrink', q.name, r.count, top)::text;
    END IF;
    new_count := coalesce(new_count, r.count);
    new_data := coalesce(new_data, r.data);
    IF owns AND (new_count <> r.count OR new_data <> r.data) THEN
        changed := 'o';
        q.held := q.held - r.count + new_count;
        q.whole := new_count = top;
    END IF;
    UPDATE :schema.requests SET count = new_count, data = new_data,
        deadline = CASE WHEN owns OR wait = '-' THEN deadline
            WHEN wait = '' OR wait = '0' THEN NULL
            ELSE clock_timestamp() + make_interval(secs => wait::bigint / 1e6) END
        WHERE queue = r.queue AND order_id = r.order_id;
    events := :schema.settle(q, changed, frozen, caller);
    IF NOT owns AND wait = '0' THEN
        SELECT * INTO q FROM :schema.queues WHERE id = q.id;
        more := CASE WHEN r.order_id > q.last_owner THEN :schema.take_out(r, 't', caller) END;
        IF more IS NOT NULL THEN
            events := events || more || :schema.settle(:schema.without(q, r), '', frozen, caller);
        END IF;
    END IF;
    RETURN json_build_array('ok', events)::text;
END $$;

-- End those of some sessions that have expired, and mend queues that are given by negative numbers;
-- answers the events.
CREATE OR REPLACE FUNCTION :schema.expire(candidates jsonb, caller text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    ids bigint[] := array(SELECT c::bigint FROM jsonb_array_elements_text(candidates) c);
    damaged bigint[] := array(SELECT -id FROM unnest(ids) id WHERE id < 0);
BEGIN
    PERFORM :schema.lock_tables();
    ids := :schema.lock_expired(ids);
    IF damaged <> '{}' THEN
        PERFORM FROM :schema.queues x WHERE x.id = ANY (damaged)
            OR x.id IN (SELECT y.queue FROM :schema.requests y WHERE y.session = ANY (ids))
            ORDER BY x.id FOR NO KEY UPDATE;
        PERFORM :schema.mend(damaged);
    END IF;
    RETURN to_json(:schema.end_sessions(ids, 'it expired', caller))::text;
END $$;
