BEGIN ISOLATION LEVEL READ COMMITTED;
-- No functions and operators that other accounts have created.
SET LOCAL search_path = pg_catalog, pg_temp;
SET LOCAL lock_timeout = 0;
SET LOCAL statement_timeout = 0;
SELECT pg_advisory_xact_lock(hashtext('tenure'), hashtext(':schema'));
CREATE SCHEMA :schema;
--#parts
INSERT INTO :schema.meta (version, serves, epoch, server, place)
    VALUES (:version, :serves, ':epoch', :schema.server_name(), ':schema.meta'::regclass);
INSERT INTO :schema.witness
    SELECT epoch, place, relaxed, quarantined_until FROM :schema.meta;
INSERT INTO :schema.nodes (path, config) VALUES (':node', ':config');
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA :schema FROM PUBLIC;
COMMIT;
