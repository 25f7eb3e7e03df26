BEGIN ISOLATION LEVEL READ COMMITTED;
-- No functions and operators that other accounts have created.
SET LOCAL search_path = pg_catalog, pg_temp;
SET LOCAL lock_timeout = '3s';
SET LOCAL statement_timeout = 0;
SELECT pg_advisory_xact_lock(hashtext('tenure'), hashtext(':schema'));
DO $upgrade$
BEGIN
    IF (SELECT version FROM :schema.meta) > :version THEN
        RAISE 'the schema has version %, and this tenure has :version',
            (SELECT version FROM :schema.meta) USING HINT = 'Upgrade tenure.';
    END IF;
END $upgrade$;
--#parts
UPDATE :schema.meta SET version = :version, serves = :serves
    WHERE version <> :version OR serves <> :serves;
-- Accounts that may use the store may use its new functions.
DO $upgrade$
DECLARE
    it text;
BEGIN
    FOR it IN SELECT oid::regprocedure FROM pg_proc
        WHERE pronamespace = ':schema'::regnamespace AND proacl IS NULL
    LOOP
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', it);
    END LOOP;
    FOR it IN SELECT DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END
        FROM pg_proc p, aclexplode(p.proacl) a
        WHERE p.pronamespace = ':schema'::regnamespace AND p.proname = 'hello'
            AND a.grantee <> p.proowner
    LOOP
        EXECUTE format('GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA :schema TO %s', it);
    END LOOP;
END $upgrade$;
COMMIT;
