-- Rates, by the rule of tenure.core.rates.

-- One operation. The reply: limit, period and burst of the rate, whether granted, wait, time, free.
CREATE OR REPLACE FUNCTION :schema.rate(
    its_path text, its_name text, kind text, new_limit bigint, new_per bigint, new_burst bigint,
    new_window bigint, its_count bigint, longest_wait bigint, refunded_at bigint, relaxed boolean
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    bins CONSTANT bigint := 100;
    most_bins CONSTANT integer := 10000;
    its_node integer;
    r :schema.rates;
    is_new boolean := false;
    instant bigint;
    back bigint;
    here integer := 1;
    total bigint;
    excess bigint;
    width bigint;
    its_last integer;
    granted boolean := false;
    changed boolean := false;
    wait bigint := 0;
    at bigint := 0;
BEGIN
    LOCK TABLE :schema.nodes, :schema.rates IN ROW EXCLUSIVE MODE;  -- before any row
    SELECT id INTO its_node FROM :schema.nodes WHERE path = its_path;
    IF NOT FOUND THEN
        RETURN '["no node"]';
    END IF;
    IF relaxed THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    ELSIF current_setting('synchronous_commit') IN ('off', 'local') THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    LOOP
        SELECT * INTO r FROM :schema.rates WHERE node = its_node AND name = its_name FOR UPDATE;
        EXIT WHEN FOUND OR kind <> 'take';
        INSERT INTO :schema.rates (node, name) VALUES (its_node, its_name) ON CONFLICT DO NOTHING;
        is_new := FOUND;
    END LOOP;
    instant := floor(extract(epoch FROM clock_timestamp()) * 1000000);  -- with the row locked
    r.times := coalesce(r.times, '{}');
    r.counts := coalesce(r.counts, '{}');
    back := coalesce(r.seen, 0) - instant;
    IF back > 0 THEN  -- the clock was set back
        r.times := ARRAY(SELECT u.t - back FROM unnest(r.times) WITH ORDINALITY u (t, o) ORDER BY o);
        changed := true;
    END IF;
    WHILE here <= cardinality(r.times) AND r.times[here] + r.time_window <= instant LOOP
        here := here + 1;
    END LOOP;
    IF here > 1 THEN
        r.times := r.times[here:];
        r.counts := r.counts[here:];
    END IF;
    IF cardinality(r.times) = 0 OR kind = 'resize' THEN
        changed := changed OR cardinality(r.times) > 0;
        r.max_count := new_limit;
        r.per := new_per;
        r.burst := new_burst;
        r.time_window := new_window;
    END IF;
    its_last := cardinality(r.times);
    total := coalesce((SELECT sum(c) FROM unnest(r.counts) c), 0);
    width := (r.time_window + bins - 1) / bins;
    IF kind = 'resize' THEN
        granted := true;
    ELSIF kind = 'refund' THEN
        here := (SELECT min(u.o) FROM unnest(r.times) WITH ORDINALITY u (t, o) WHERE u.t >= refunded_at);
        IF refunded_at + r.time_window > instant AND r.times[here] / width = refunded_at / width THEN
            granted := true;
            changed := true;
            total := total - least(its_count, r.counts[here]);
            r.counts[here] := greatest(r.counts[here] - its_count, 0);
            IF r.counts[here] = 0 THEN
                r.times := r.times[:here - 1] || r.times[here + 1:];
                r.counts := r.counts[:here - 1] || r.counts[here + 1:];
            END IF;
        END IF;
    ELSIF (r.max_count, r.per, r.burst) = (new_limit, new_per, new_burst) THEN
        at := greatest(instant, r.times[its_last]);
        excess := total + its_count - r.burst;
        here := 0;
        WHILE excess > 0 AND here < its_last LOOP
            here := here + 1;
            excess := excess - r.counts[here];
        END LOOP;
        IF here > 0 THEN
            at := greatest(at, r.times[here] + r.time_window);
        END IF;
        wait := at - instant;
        IF kind = 'take' AND wait <= coalesce(longest_wait, wait) THEN
            IF its_last > 0 AND r.times[its_last] / width = at / width THEN
                granted := true;
                r.times[its_last] := at;
                r.counts[its_last] := r.counts[its_last] + its_count;
            ELSIF its_last < most_bins THEN
                granted := true;
                r.times := r.times || at;
                r.counts := r.counts || its_count;
            END IF;
        END IF;
        IF granted THEN
            changed := true;
            total := total + its_count;
        ELSE
            at := 0;
        END IF;
    END IF;
    its_last := cardinality(r.times);
    IF r.node IS NOT NULL AND changed AND its_last = 0 THEN
        DELETE FROM :schema.rates WHERE node = its_node AND name = its_name;
    ELSIF r.node IS NOT NULL AND changed THEN
        UPDATE :schema.rates SET max_count = r.max_count, per = r.per, burst = r.burst,
            time_window = r.time_window, seen = instant, times = r.times, counts = r.counts
            WHERE node = its_node AND name = its_name;
    END IF;
    IF is_new THEN
        PERFORM :schema.remove_rates(instant);
    END IF;
    RETURN json_build_array('ok', r.max_count, r.per, r.burst, granted, wait, at,
        CASE WHEN r.times[its_last] > instant THEN 0 ELSE greatest(r.burst - total, 0) END)::text;
END $$;

-- Remove some rates that are over. `check_at` is indexed, so that a take writes no index.
CREATE OR REPLACE FUNCTION :schema.remove_rates(instant bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    r :schema.rates;
    expires bigint;
BEGIN
    FOR r IN SELECT * FROM :schema.rates WHERE check_at <= instant ORDER BY check_at LIMIT 10
        FOR UPDATE SKIP LOCKED
    LOOP
        expires := r.times[cardinality(r.times)] + r.time_window;
        IF expires > instant THEN
            UPDATE :schema.rates SET check_at = expires WHERE node = r.node AND name = r.name;
        ELSE
            DELETE FROM :schema.rates WHERE node = r.node AND name = r.name;
        END IF;
    END LOOP;
END $$;
